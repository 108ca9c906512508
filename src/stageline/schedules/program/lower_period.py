"""Lower a schedule to the period of a program, which the runtime repeats for every mini-batch.

A program of one mini-batch is a period without lag. The period of a stream is cut out of the middle
of a program that is long enough to fill and drain the pipeline, from the first forward of one
mini-batch to the first forward of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.check import check
from stageline.schedules.edges import Edge
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue, Program
from stageline.schedules.program.stream import Period, PeriodEntry, entry_of, find_period, unroll
from stageline.schedules.schedule import Schedule, is_scheduled

RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def lower_period(
    schedule: Schedule, edges: Iterable[Edge], epilogue: Epilogue = NO_EPILOGUE
) -> Period:
    """Return the actions that each rank repeats for every mini-batch, with all communication."""
    if not schedule.is_stream:
        return _period_of_one(lower(schedule, edges, epilogue))
    period = find_period(schedule)
    middle = period.lag + 1
    program = lower(unroll(period, 2 * period.lag + 3), edges, epilogue)
    check(program)  # ranks that meet before their steps may deadlock in a stream that is legal
    entries = {entry.action: entry for row in period.rows for entry in row}
    size = period.num_microbatches
    rows = (tuple(_segment(row, middle, entries, size)) for row in program.actions)
    return Period(tuple(rows), period.placement, size, period.replicas, program.edges)


def _period_of_one(program: Program) -> Period:
    rows = tuple(tuple(PeriodEntry(action) for action in row) for row in program.actions)
    size = program.schedule.num_microbatches
    return Period(rows, program.placement, size, program.replicas, program.edges)


def _segment(
    row: Iterable[Action], wanted: int, entries: dict[Action, PeriodEntry], size: int
) -> Iterator[PeriodEntry]:
    """Yield the entries of one segment of a row.

    An inserted action belongs to the segment of the scheduled action before it, but a receive
    belongs at the earliest to the segment in which its mini-batch begins.
    """
    segment = 0
    for action in row:
        entry = entry_of(action, wanted, size)
        minibatch = wanted - entry.lag
        if is_scheduled(action):
            # the middle of the program may be early enough that its actions still use version 0
            entry = entries[entry.action]
            segment = minibatch + entry.lag
        own = max(segment, minibatch) if action.kind in RECEIVES else segment
        if own == wanted:
            yield entry
