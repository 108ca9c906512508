"""Where a step's time goes: seven parts of ranks × time that add up to the whole.

compute     forwards and backwards
recompute   forwards that are run a second time
update      steps of the optimizer
transfer    a rank waits while what it needs is on a link
bubble      a rank waits for the work of others, as much as if all stages took equally long
imbalance   waiting beyond that
set-up      the rest: cutting the batch and starting ranks, and the time between two actions in
            which a rank neither works nor waits

They are taken from the measured timeline: a recomputed backward has two spans there, of which the
first is the recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import fmean
from typing import NamedTuple

import stageline as sl

BACKWARD = (sl.Kind.B, sl.Kind.I)


@dataclass(frozen=True)
class Parts:
    """The parts of a step, as times or as shares of the whole."""

    compute: float
    recompute: float
    bubble: float
    imbalance: float
    transfer: float
    set_up: float
    update: float

    @property
    def total(self) -> float:
        return math.fsum(astuple(self))

    def shares(self) -> dict[str, float]:
        """Return each part over the total, by its name."""
        return {name.replace("_", "-"): time / self.total for name, time in asdict(self).items()}


class Work(NamedTuple):
    """One span of a rank, with what it is."""

    part: str  # "forward", "backward", "recompute" or "update"
    action: sl.Action
    start: float
    end: float

    @property
    def time(self) -> float:
        return self.end - self.start


class Gap(NamedTuple):
    """The time in front of an action, as the sum of three parts."""

    waiting: float  # for the work of another device
    transfer: float  # of the result of that work
    set_up: float  # nothing is missing


def parts_of_step(timeline: sl.Timeline, whole: float, *, links: bool) -> Parts:
    """Return the mean parts of all devices in a step that took `whole` ms.

    With `links`, every second rank of the timeline is the link between its neighbours.
    """
    rows = [list(work_of(row)) for row in timeline.spans]
    ranks = range(0, len(rows), 2 if links else 1)
    devices = [rows[rank] for rank in ranks]
    ends = {(rank, work.action): work.end for rank, row in enumerate(rows) for work in row}
    gaps = [gap for rank in ranks for gap in gaps_of(rank, rows[rank], ends, links=links)]
    after = [timeline.makespan - row[-1].end for row in devices]  # until the last rank is done
    count = len(devices)
    waiting = (sum(gap.waiting for gap in gaps) + sum(after)) / count
    bubble = min(waiting, ideal_bubble(devices))
    return Parts(
        compute=(_total(devices, "forward") + _total(devices, "backward")) / count,
        recompute=_total(devices, "recompute") / count,
        bubble=bubble,
        imbalance=waiting - bubble,
        transfer=sum(gap.transfer for gap in gaps) / count,
        set_up=sum(gap.set_up for gap in gaps) / count + whole - timeline.makespan,
        update=_total(devices, "update") / count,
    )


def work_of(row: Sequence[tuple[sl.Action, float, float]]) -> Iterator[Work]:
    """Yield a rank's spans; the first of two spans of a backward is its recomputation."""
    count = {action: 0 for action, _, _ in row}
    for action, _, _ in row:
        count[action] += 1
    for action, start, end in row:
        count[action] -= 1
        if action.kind is sl.Kind.STEP:
            part = "update"
        elif action.kind in BACKWARD:
            part = "recompute" if count[action] else "backward"
        else:
            part = "forward"
        yield Work(part, action, start, end)


def gaps_of(
    rank: int, row: Sequence[Work], ends: dict[tuple[int, sl.Action], float], *, links: bool
) -> Iterator[Gap]:
    """Yield the time before each span of a device; `ends` has the ends of all ranks' actions."""
    free = 0.0
    for work in row:
        made, arrived = needed_by(rank, work, ends, links=links)
        made, arrived = (min(max(free, time), work.start) for time in (made, arrived))
        yield Gap(made - free, arrived - made, work.start - arrived)
        free = work.end


def needed_by(
    rank: int, work: Work, ends: dict[tuple[int, sl.Action], float], *, links: bool
) -> tuple[float, float]:
    """Return when another device had made what this needs, and when it was there; 0 if nothing."""
    step = {"forward": -1, "backward": 1}.get(work.part, 0)
    stage, kind, microbatch = work.action.stage, work.action.kind, work.action.microbatch

    def end(distance: int) -> float:
        other = sl.Action(stage + distance * step, kind, microbatch)
        return ends.get((rank + distance * step, other), 0.0)

    if not step:
        return 0.0, 0.0
    return (end(2), end(1)) if links else (end(1), end(1))


def ideal_bubble(devices: Sequence[Sequence[Work]]) -> float:
    """Return how long each rank would wait in GPipe's order if all stages took the mean times.

    A first micro-batch reaches the last rank after p - 1 forwards, and the last gradient returns
    through p - 1 backwards; recomputations are done meanwhile.
    """
    forward, backward = (_mean(devices, part) for part in ("forward", "backward"))
    return (len(devices) - 1) * (forward + backward)


def _mean(rows: Sequence[Sequence[Work]], part: str) -> float:
    return fmean(work.time for row in rows for work in row if work.part == part)


def _total(rows: Sequence[Sequence[Work]], part: str) -> float:
    return sum(work.time for row in rows for work in row if work.part == part)
