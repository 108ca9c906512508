"""Represent a stream, many mini-batches without a flush between them, as one repeated period.

1F1B on stage 0 of 3 with an update for every micro-batch runs two forwards ahead of its backwards:

    F0 F1 F2 B0 S1 F3 B1 S2 F4 B2 S3 B3 S4 B4 S5
    ^  ^  ^        ^        ^        drain          5 mini-batches of one micro-batch

Each mini-batch begins a segment, marked with ^. The segment of mini-batch u is `Fu Bu-2 Su-1`,
without the actions of mini-batches that do not exist: the first segments have no backwards, and the
segments after the last mini-batch, the drain, have no forwards. So one period defines a stream of
any length, and the runtime need not know in advance how many mini-batches there will be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from stageline.errors import ScheduleError
from stageline.schedules.action import COMPUTE, NO_VERSION, WHOLE_BATCH, Action, Kind
from stageline.schedules.edges import Edge, Routes
from stageline.schedules.placement import Placement, Replicas
from stageline.schedules.schedule import Schedule


class PeriodEntry(NamedTuple):
    """One action of a period; its micro-batch is numbered within its own mini-batch."""

    action: Action  # without a version
    lag: int = 0  # its mini-batch is this many before the one that begins the segment
    version: int = 0  # of its weights; 0 includes the steps of all mini-batches before its own


@dataclass(frozen=True)
class Period:
    """The actions of every rank from the first forward of one mini-batch to that of the next."""

    rows: tuple[tuple[PeriodEntry, ...], ...]
    placement: Placement
    num_microbatches: int
    replicas: Replicas = ()
    edges: tuple[Edge, ...] = ()  # if it is the period of a program

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.edges, self.placement, self.replicas)

    @cached_property
    def lag(self) -> int:
        """Return how many segments after its first forward a mini-batch's last action runs."""
        return max((entry.lag for row in self.rows for entry in row), default=0)


def unroll(period: Period, num_minibatches: int, name: str = "") -> Schedule:
    """Return the stream of `num_minibatches` mini-batches that repeats this period.

    >>> F, B, S = Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(0, Kind.STEP)
    >>> row = (PeriodEntry(F, version=-1), PeriodEntry(B, 1, -1), PeriodEntry(S, 1, +1))
    >>> period = Period((row,), (0,), 1)
    >>> print(unroll(period, 3))
    0F0@0 0F1@0 0B0@0 0STEP@1 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3
    """
    rows = (tuple(_unroll_row(row, period, num_minibatches)) for row in period.rows)
    return Schedule(tuple(rows), period.placement, name, period.replicas)


def _unroll_row(
    row: Sequence[PeriodEntry], period: Period, num_minibatches: int
) -> Iterator[Action]:
    for segment in range(num_minibatches + period.lag):
        for entry in row:
            minibatch = segment - entry.lag
            if 0 <= minibatch < num_minibatches:
                yield action_at(entry, minibatch, period.num_microbatches)


def action_at(entry: PeriodEntry, minibatch: int, size: int) -> Action:
    """Return the action of an entry in one mini-batch; the first mini-batches use version 0."""
    action = entry.action
    is_whole = action.microbatch == WHOLE_BATCH
    microbatch = WHOLE_BATCH if is_whole else minibatch * size + action.microbatch
    has_version = is_whole or action.kind in COMPUTE
    version = max(0, minibatch + entry.version) if has_version else NO_VERSION
    return action._replace(microbatch=microbatch, version=version)


def find_period(schedule: Schedule) -> Period:
    """Return the period that a stream repeats; raise `ScheduleError` if there is none.

    A finite stream does not say where its drain begins. So segment after segment is tried, until
    one is found that gives the whole schedule when it is unrolled.
    """
    for segment in range(schedule.num_minibatches):
        period = _period(schedule, segment)
        if unroll(period, schedule.num_minibatches) == schedule:
            return period
    raise ScheduleError(
        f"this schedule of {schedule.num_minibatches} mini-batches repeats no period, but a stream "
        "must: use the same order for all mini-batches, and enough of them to fill the pipeline"
    )


def _period(schedule: Schedule, segment: int) -> Period:
    size = schedule.num_microbatches
    rows = []
    for row in schedule.actions:
        first, behind = segment_bounds(row, size, schedule.num_minibatches)[segment]
        rows.append(tuple(entry_of(action, segment, size) for action in row[first:behind]))
    return Period(tuple(rows), schedule.placement, size, schedule.replicas)


def entry_of(action: Action, segment: int, size: int) -> PeriodEntry:
    """Return an action of a stream as an entry of a period."""
    minibatch = minibatch_of(action, size)
    is_whole = action.microbatch == WHOLE_BATCH
    microbatch = WHOLE_BATCH if is_whole else action.microbatch % size
    version = 0 if action.version == NO_VERSION else action.version - minibatch
    local = action._replace(microbatch=microbatch, version=NO_VERSION)
    return PeriodEntry(local, segment - minibatch, version)


def segment_bounds(row: Iterable[Action], size: int, num_minibatches: int) -> list[tuple[int, int]]:
    """Return the positions at which each mini-batch's segment of a row begins and ends."""
    firsts: dict[int, int] = {}
    row = list(row)
    for position, action in enumerate(row):
        if action.kind is Kind.F:
            firsts.setdefault(action.microbatch // size, position)
    starts = [firsts.get(minibatch, len(row)) for minibatch in range(num_minibatches)]
    return list(pairwise([*starts, len(row)]))


def minibatch_of(action: Action, size: int) -> int:
    """Return the mini-batch of an action; the step of mini-batch n makes version n + 1."""
    is_whole = action.microbatch == WHOLE_BATCH
    return action.version - 1 if is_whole else action.microbatch // size


def version_made_from(action: Action, size: int) -> int:
    """Return the version made by the step that an action's gradient contributes to."""
    return NO_VERSION if action.version == NO_VERSION else action.microbatch // size + 1


def as_stream(schedule: Schedule, num_minibatches: int) -> Schedule:
    """Return a synchronous schedule repeated for several mini-batches without a barrier.

    Each stage steps its optimizer after its last gradient of a mini-batch. Between mini-batches a
    rank waits for others only where it needs their results.

    >>> print(as_stream(Schedule.from_text("0F0 0B0", "1F0 1B0"), 2))
    0F0@0 0B0@0 0STEP@1 0F1@1 0B1@1 0STEP@2
    1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1 1STEP@2
    """
    rows = tuple(tuple(_with_steps(row)) for row in schedule.actions)
    period = Period(rows, schedule.placement, schedule.num_microbatches)
    return unroll(period, num_minibatches, schedule.name)


def _with_steps(row: Iterable[Action]) -> Iterator[PeriodEntry]:
    row = list(row)
    last = {a.stage: position for position, a in enumerate(row) if a.kind in (Kind.W, Kind.B)}
    for position, action in enumerate(row):
        yield PeriodEntry(action)
        if last.get(action.stage) == position:
            yield PeriodEntry(Action(action.stage, Kind.STEP), version=1)
