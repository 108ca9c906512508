"""A stream: mini-batch after mini-batch with no flush between, told as one period that repeats.

1F1B on stage 0 of 3 with an update for every micro-batch runs two forwards ahead of its backwards:

    F0 F1 F2 B0 S1 F3 B1 S2 F4 B2 S3 B3 S4 B4 S5
    ^  ^  ^        ^        ^        drain          5 mini-batches of one micro-batch

Each mini-batch begins a segment, marked here. With u for its number, every segment is `Fu Bu-2
Su-1`, of which what does not exist is left out: in the first segments the backwards, and in those
behind the last mini-batch, the drain, the forwards. So one period tells a stream of any length,
and a runtime that follows it need not know how many mini-batches will come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from stageline.errors import ScheduleError
from stageline.schedules.action import COMPUTE, NO_VERSION, WHOLE_BATCH, Action, Kind
from stageline.schedules.edges import Edge, Routes
from stageline.schedules.placement import Placement, Replicas
from stageline.schedules.schedule import Schedule


class Beat(NamedTuple):
    """An action of a period; its micro-batch counts within its own mini-batch."""

    action: Action  # names no version
    lag: int = 0  # how many mini-batches its own came before the one that begins the segment
    version: int = 0  # of its weights: 0 has all steps of the mini-batches before its own


@dataclass(frozen=True)
class Period:
    """What every rank does from the first forward of a mini-batch to that of the next."""

    rows: tuple[tuple[Beat, ...], ...]
    placement: Placement
    num_microbatches: int
    replicas: Replicas = ()
    edges: tuple[Edge, ...] = ()  # of a program

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.edges, self.placement, self.replicas)

    @property
    def lag(self) -> int:
        """How many mini-batches after its own the last action of a mini-batch comes."""
        return max((beat.lag for row in self.rows for beat in row), default=0)


def unrolled(period: Period, num_minibatches: int, name: str = "") -> Schedule:
    """The stream of so many mini-batches.

    >>> F, B, S = Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(0, Kind.STEP)
    >>> period = Period(((Beat(F, version=-1), Beat(B, 1, -1), Beat(S, 1, +1)),), (0,), 1)
    >>> print(unrolled(period, 3))
    0F0@0 0F1@0 0B0@0 0STEP@1 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3
    """
    rows = (tuple(_unrolled(row, period, num_minibatches)) for row in period.rows)
    return Schedule(tuple(rows), period.placement, name, period.replicas)


def _unrolled(row: Iterable[Beat], period: Period, num_minibatches: int) -> Iterator[Action]:
    beats = list(row)
    for segment in range(num_minibatches + period.lag):
        for beat in beats:
            minibatch = segment - beat.lag
            if 0 <= minibatch < num_minibatches:
                yield at(beat, minibatch, period.num_microbatches)


def at(beat: Beat, minibatch: int, size: int) -> Action:
    """An action of a period, in one of the mini-batches; the first ones use the first weights."""
    action = beat.action
    is_whole = action.microbatch == WHOLE_BATCH
    microbatch = WHOLE_BATCH if is_whole else minibatch * size + action.microbatch
    has_version = is_whole or action.kind in COMPUTE
    version = max(0, minibatch + beat.version) if has_version else NO_VERSION
    return action._replace(microbatch=microbatch, version=version)


def folded(schedule: Schedule) -> Period:
    """The period that a stream repeats.

    A finite stream does not tell where its drain begins: tried are the segments one by one, until
    one of them gives the whole schedule.
    """
    for segment in range(schedule.num_minibatches):
        period = _period(schedule, segment)
        if unrolled(period, schedule.num_minibatches) == schedule:
            return period
    raise ScheduleError(
        f"no period gives this schedule of {schedule.num_minibatches} mini-batches, but a stream "
        "repeats itself: are its mini-batches alike, and enough of them to fill the pipeline?"
    )


def _period(schedule: Schedule, segment: int) -> Period:
    size = schedule.num_microbatches
    rows = []
    for row in schedule.actions:
        first, behind = segment_bounds(row, size, schedule.num_minibatches)[segment]
        rows.append(tuple(beat_of(action, segment, size) for action in row[first:behind]))
    return Period(tuple(rows), schedule.placement, size, schedule.replicas)


def beat_of(action: Action, segment: int, size: int) -> Beat:
    """An action of a stream, as one of a period."""
    minibatch = minibatch_of(action, size)
    is_whole = action.microbatch == WHOLE_BATCH
    microbatch = WHOLE_BATCH if is_whole else action.microbatch % size
    version = 0 if action.version == NO_VERSION else action.version - minibatch
    local = action._replace(microbatch=microbatch, version=NO_VERSION)
    return Beat(local, segment - minibatch, version)


def segment_bounds(row: Iterable[Action], size: int, num_minibatches: int) -> list[tuple[int, int]]:
    """Where each mini-batch's segment of a row begins and ends."""
    firsts: dict[int, int] = {}
    row = list(row)
    for position, action in enumerate(row):
        if action.kind is Kind.F:
            firsts.setdefault(action.microbatch // size, position)
    starts = [firsts.get(minibatch, len(row)) for minibatch in range(num_minibatches)]
    return list(pairwise([*starts, len(row)]))


def minibatch_of(action: Action, size: int) -> int:
    """The one that an action is done for; a step makes the version after its mini-batch's."""
    is_whole = action.microbatch == WHOLE_BATCH
    return action.version - 1 if is_whole else action.microbatch // size


def made_from(action: Action, size: int) -> int:
    """The version that the step makes which an action's gradient goes into."""
    return NO_VERSION if action.version == NO_VERSION else action.microbatch // size + 1


def streamed(schedule: Schedule, num_minibatches: int) -> Schedule:
    """A synchronous schedule once for each mini-batch, a stage's step behind its last gradient.

    No rank waits for another at the end of a mini-batch, but for what it needs from it.

    >>> print(streamed(Schedule.from_text("0F0 0B0", "1F0 1B0"), 2))
    0F0@0 0B0@0 0STEP@1 0F1@1 0B1@1 0STEP@2
    1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1 1STEP@2
    """
    rows = tuple(tuple(_with_steps(row)) for row in schedule.actions)
    period = Period(rows, schedule.placement, schedule.num_microbatches)
    return unrolled(period, num_minibatches, schedule.name)


def _with_steps(row: Iterable[Action]) -> Iterator[Beat]:
    row = list(row)
    last = {a.stage: position for position, a in enumerate(row) if a.kind in (Kind.W, Kind.B)}
    for position, action in enumerate(row):
        yield Beat(action)
        if last.get(action.stage) == position:
            yield Beat(Action(action.stage, Kind.STEP), version=1)
