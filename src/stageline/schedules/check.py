"""Check a schedule or a program against its rules."""

from __future__ import annotations

from stageline.arguments import check_type
from stageline.schedules.edges import checked_edges
from stageline.schedules.program.program import Program
from stageline.schedules.rules.program_rules import PROGRAM_RULES, ProgramFacts
from stageline.schedules.rules.rule import enforce
from stageline.schedules.rules.schedule_rules import DEADLOCK_RULES, SCHEDULE_RULES, ScheduleFacts
from stageline.schedules.rules.stream_rules import STREAM_RULES, StreamFacts
from stageline.schedules.schedule import Schedule

PASSED = "has_passed_check"  # values never change, so one that passed need not be checked again


def check(work: Schedule | Program) -> None:
    """Raise `ScheduleError` for the first broken rule, with the place marked in the grid.

    A schedule has no sends. `lower` adds them such that a schedule without a deadlock for buffered
    sends has none for rendezvous sends either. A program is checked for both, wherever it is from.

    >>> check(Schedule.from_text("0F0 0B0", "1F0 1B0"))
    >>> check(Schedule.from_text("0F0 0B0", "1B0 1F0"))
    Traceback (most recent call last):
    stageline.errors.ScheduleError: 1B0 comes before 1F0, which it needs: swap them
    rank 0 │  0F0   0B0
    rank 1 │ >1B0< >1F0<
    """
    check_type("a schedule", work, (Schedule, Program), "build one with sl.build_schedule")
    if PASSED in work.__dict__:
        return
    if isinstance(work, Program):
        check(work.schedule)
        checked_edges(work.edges, len(work.placement))
        enforce(PROGRAM_RULES, ProgramFacts(work), work.actions)
    else:
        enforce(SCHEDULE_RULES, ScheduleFacts(work), work.actions)
        if work.is_stream:
            enforce(STREAM_RULES, StreamFacts(work), work.actions)
        enforce(DEADLOCK_RULES, ScheduleFacts(work), work.actions)
    work.__dict__[PASSED] = True
