"""Check a schedule or a program against its rules."""

from __future__ import annotations

from stageline.arguments import check_arguments, check_type
from stageline.errors import ScheduleError
from stageline.schedules.edges import checked_edges
from stageline.schedules.program.channel_tasks import Channels
from stageline.schedules.program.program import Program
from stageline.schedules.rules.channel_rules import CHANNEL_RULES
from stageline.schedules.rules.program_rules import PROGRAM_RULES, ProgramFacts
from stageline.schedules.rules.rule import enforce
from stageline.schedules.rules.schedule_rules import DEADLOCK_RULES, SCHEDULE_RULES, ScheduleFacts
from stageline.schedules.rules.stream_rules import STREAM_RULES, StreamFacts
from stageline.schedules.schedule import Schedule

PASSED = "passed_checks"  # values never change: what one has passed need not be checked again


def check(work: Schedule | Program, *, channels: Channels = "directed") -> None:
    """Raise `ScheduleError` for the first broken rule, with the place marked in the grid.

    A schedule has no sends. `lower` adds them such that a schedule without a deadlock for buffered
    sends has none for rendezvous sends either. A program is checked for both, wherever it is from.

    >>> check(Schedule.from_text("0F0 0B0", "1F0 1B0"))
    >>> check(Schedule.from_text("0F0 0B0", "1B0 1F0"))
    Traceback (most recent call last):
    stageline.errors.ScheduleError: 1B0 comes before 1F0, which it needs: swap them
    rank 0 │  0F0   0B0
    rank 1 │ >1B0< >1F0<

    A program is also checked for channels: queues, such as NCCL's communicators, whose operations
    run in the order in which each rank issues them. There is one for each direction between two
    ranks, and others for collectives. With `channels="shared"`, both directions share a channel, as
    they do in torch.distributed's send and recv over NCCL, which programs of `lower` are not for:

    >>> from stageline.schedules.program.lower import lower
    >>> program = lower(Schedule.from_text("0F0 0B0", "1F0 1B0"))
    >>> check(program)
    >>> check(program, channels="shared")
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    stageline.errors.ScheduleError: ... 0RECV_B0 for 1SEND_B0 behind 1RECV_F0 on the channel of ...
    rank 0 │  0F0  >0RECV_B0<  0SEND_F0   0B0   0REDUCE_GRAD   0STEP
    rank 1 │ >1RECV_F0<  1F0   1B0   1SEND_B0   1REDUCE_GRAD   1STEP
    """
    check_type("a schedule", work, (Schedule, Program), "build one with sl.build_schedule")
    check_arguments(check, {"channels": channels})
    passed = work.__dict__.setdefault(PASSED, set())
    if channels in passed:
        return
    if isinstance(work, Schedule):
        if channels != "directed":
            raise ScheduleError(
                f"channels is {channels!r}, but a schedule has no messages: check its program, "
                "which sl.lower(schedule) returns"
            )
        _check_schedule(work)
    elif channels == "directed":
        _check_program(work)
    else:
        check(work)
        enforce(CHANNEL_RULES[channels], ProgramFacts(work), work.actions)
    passed.add(channels)


def _check_schedule(schedule: Schedule) -> None:
    enforce(SCHEDULE_RULES, ScheduleFacts(schedule), schedule.actions)
    if schedule.is_stream:
        enforce(STREAM_RULES, StreamFacts(schedule), schedule.actions)
    enforce(DEADLOCK_RULES, ScheduleFacts(schedule), schedule.actions)


def _check_program(program: Program) -> None:
    check(program.schedule)
    checked_edges(program.edges, len(program.placement))
    facts = ProgramFacts(program)
    enforce(PROGRAM_RULES, facts, program.actions)
    enforce(CHANNEL_RULES["directed"], facts, program.actions)
