"""What the runtime repeats: the period of a program, with its messages.

A program of one mini-batch is a period without lag. That of a stream is cut out of the middle of a
program that is long enough to be filled and drained, at the first forwards of two mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.edges import Edge
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue, Program
from stageline.schedules.program.stream import Beat, Period, beat_of, folded, unrolled
from stageline.schedules.schedule import Schedule, is_scheduled

ASKED = (Kind.RECV_F, Kind.RECV_B)


def routine(schedule: Schedule, edges: Iterable[Edge], epilogue: Epilogue = NO_EPILOGUE) -> Period:
    """What each rank does for every mini-batch."""
    if not schedule.is_stream:
        return _once(lower(schedule, edges, epilogue))
    period = folded(schedule)
    middle = period.lag + 1
    program = lower(unrolled(period, 2 * period.lag + 3), edges, epilogue)
    beats = {beat.action: beat for row in period.rows for beat in row}
    rows = (tuple(_segment(row, middle, beats, period.num_microbatches)) for row in program.actions)
    return Period(
        tuple(rows), period.placement, period.num_microbatches, period.replicas, program.edges
    )


def _once(program: Program) -> Period:
    rows = tuple(tuple(Beat(action) for action in row) for row in program.actions)
    size = program.schedule.num_microbatches
    return Period(rows, program.placement, size, program.replicas, program.edges)


def _segment(
    row: Iterable[Action], wanted: int, beats: dict[Action, Beat], size: int
) -> Iterator[Beat]:
    """What stands between the actions of a schedule belongs to the segment of the one before it;
    but a message is asked for when its mini-batch has begun.
    """
    segment = 0
    for action in row:
        beat = beat_of(action, wanted, size)
        minibatch = wanted - beat.lag
        if is_scheduled(action):
            beat = beats[beat.action]  # the middle may still be so early that it uses version 0
            segment = minibatch + beat.lag
        own = max(segment, minibatch) if action.kind in ASKED else segment
        if own == wanted:
            yield beat
