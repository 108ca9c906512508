"""What stored cells say: the rows of all tables and of the pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from benchmarks.compare.contestants import loops, ours
from benchmarks.compare.report.ratios import Ratio, median_with_interval, paired
from experiments.results import Run

Runs = Mapping[str, Run]


class Speed(NamedTuple):
    """How much faster one contestant was than another, in the rounds of one cell."""

    cell: str  # without its kind
    ours: str
    peer: str
    seconds: tuple[float, float]  # medians of both
    ratio: Ratio  # of throughputs: above 1 the first is the faster one
    order: str


def speeds(runs: Runs, kind: str) -> Iterator[Speed]:
    """Yield each of Stageline's contestants beside each peer of its cell."""
    for name, run in of_kind(runs, kind):
        times = run["times"]
        mine = [each for each in times if each.startswith(ours.PROCESSES)]
        for one in mine:
            for other in (each for each in times if each not in mine):
                yield speed(name, run, one, other)


def speed(cell: str, run: Run, one: str, other: str) -> Speed:
    times = run["times"]
    seconds = median(times[one]), median(times[other])
    ratio = paired(times[other], times[one])
    return Speed(cell, one, other, seconds, ratio, run.get("order", ""))


def of_kind(runs: Runs, kind: str) -> Iterator[tuple[str, Run]]:
    """Yield the cells of a kind in the order of the file, without it in their names."""
    for name, run in runs.items():
        first, _, rest = name.partition(" | ")
        if first == kind:
            yield rest, run


class HostTime(NamedTuple):
    """Microseconds of an action, by contestant, for one number of micro-batches."""

    cell: str
    num_microbatches: int
    microseconds: dict[str, Ratio]


def host_times(runs: Runs) -> list[HostTime]:
    """Return the cells of `host` by their number of micro-batches."""
    found = [
        HostTime(
            name,
            run["cell"]["num_microbatches"],
            {
                each: median_with_interval([1e6 * t / run["num_actions"] for t in times])
                for each, times in run["times"].items()
            },
        )
        for name, run in of_kind(runs, "host")
    ]
    return sorted(found, key=lambda each: (each.cell.split(" | ")[0], each.num_microbatches))


class Peaks(NamedTuple):
    """Bytes of each rank: Stageline's and those of the peer."""

    cell: str
    ours: list[int]
    peer: list[int]


def peaks(runs: Runs, kind: str, mine: str, peer: str) -> Iterator[Peaks]:
    """Yield the cells of a kind that both have."""
    found: dict[str, dict[str, Any]] = {}
    for name, run in of_kind(runs, kind):
        cell, _, who = name.rpartition(" | ")
        found.setdefault(cell, {})[who] = run["peaks"]
    for cell, by_library in found.items():
        if mine in by_library and peer in by_library:
            yield Peaks(cell, by_library[mine], by_library[peer])


def over_limit(run: Run, name: str, factor: str = "bubble_factor") -> Ratio | None:
    """Return a contestant's step over the machine's limit and the bubble of its order.

    `measured_bubble_factor` is the bubble with the costs that its stages were measured to have.
    """
    times = run["times"]
    if loops.LIMIT not in times or name not in times or factor not in run:
        return None
    limit = [run[factor] * seconds for seconds in times[loops.LIMIT]]
    return paired(times[name], limit)


def summary(runs: Runs) -> dict[str, Any]:
    """Return the ratios of all cells, as JSON has them."""
    kinds = ("pipelines", "one-rank", "emulated", "by-hand", "ablation")
    return {
        kind: [
            {"cell": each.cell, "of": each.ours, "over": each.peer, "order": each.order}
            | each.ratio._asdict()
            for each in speeds(runs, kind)
        ]
        for kind in kinds
    }
