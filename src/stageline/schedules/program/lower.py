"""Lower a schedule to a program: add sends, receives, reductions and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable

from stageline.arguments import check_type
from stageline.schedules.check import check
from stageline.schedules.edges import Edge
from stageline.schedules.program.insert_communication import insert_communication
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue, Program
from stageline.schedules.schedule import Schedule


def lower(
    schedule: Schedule, edges: Iterable[Edge] | None = None, epilogue: Epilogue = NO_EPILOGUE
) -> Program:
    """Return the program of a schedule: its actions with all communication and optimizer steps.

    `edges` are the values passed between stages, as (writer, reader). By default each stage reads
    the output of the previous one. A value is sent directly to its reader, not through the stages
    between. `epilogue` is what the model needs before its optimizer steps: sums over tied weights,
    updates of running statistics, clipping.

    >>> program = lower(Schedule.from_text("0F0 0B0", "1F0 1B0"))
    >>> print(*program.actions[0])
    0F0 0RECV_B0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP
    """
    check_type("a schedule", schedule, Schedule, "build one with sl.build_schedule")
    check(schedule)
    return insert_communication(schedule, edges, epilogue)
