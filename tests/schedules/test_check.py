"""For every rule, a schedule or program that breaks only that rule, and the resulting error."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pytest

from stageline.errors import ScheduleError
from stageline.schedules import csv
from stageline.schedules.action import Action, Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.edges import Edge, chain
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue, Program
from stageline.schedules.rules.channel_rules import CHANNEL_RULES
from stageline.schedules.rules.program_rules import PROGRAM_RULES, ProgramFacts
from stageline.schedules.rules.schedule_rules import DEADLOCK_RULES, SCHEDULE_RULES, ScheduleFacts
from stageline.schedules.rules.stream_rules import STREAM_RULES, StreamFacts
from stageline.schedules.schedule import Schedule

SIZES = [(1, 2), (2, 4), (3, 7), (4, 8)]


def program(
    *rows: str, edges: tuple[Edge, ...] | None = None, epilogue: Epilogue = NO_EPILOGUE
) -> Program:
    """Build a program from one string per rank, which contains all actions."""
    actions = tuple(tuple(csv.parse_cells(row.split(), rank)) for rank, row in enumerate(rows))
    schedule = Schedule.from_text(*rows)
    edges = chain(schedule.num_stages) if edges is None else edges
    return Program(actions, schedule.placement, edges, "", schedule.replicas, epilogue)


class Broken(NamedTuple):
    """A schedule or program that breaks one rule, the first line of its error, the marked cells."""

    work: Schedule | Program
    message: str
    marked: tuple[str, ...]


BROKEN = {
    "not empty": Broken(
        Schedule(((), ()), (0, 1)), "2 ranks have no actions: is this a schedule?", ()
    ),
    "known kinds": Broken(
        Schedule(((Action(0, cast("Kind", "F"), 0), Action(0, Kind.B, 0)),), (0,)),
        "the kind of 0F0 is 'F': use one of sl.Kind",
        ("0F0",),
    ),
    "integers": Broken(
        Schedule(((Action(0, Kind.F, cast("int", "0")), Action(0, Kind.B, 0)),), (0,)),
        "(0, <Kind.F: 'F'>, '0', -1, -1) is not a valid action: its stage, micro-batch, peer and "
        "version must be integers, as in sl.Action(2, sl.Kind.F, 0)",
        ("0F0",),
    ),
    "known ranks": Broken(
        Schedule(Schedule.from_text("0F0 0B0", "1F0 1B0").actions, (0, 2)),
        "stage 1 is placed on rank 2, but ranks go from 0 to 1: place it on one of these",
        (),
    ),
    "only compute": Broken(
        Schedule.from_text("0F0 0SEND_F0 0B0", "1F0 1B0"),
        "0SEND_F0 is in a schedule, which has only F, I, W and B: remove it, lower() will add it",
        ("0SEND_F0",),
    ),
    "no peers": Broken(
        Schedule(((Action(0, Kind.F, 0, peer=3), Action(0, Kind.B, 0)),), (0,)),
        "0F0>3 has stage 3 as its peer, but only sends and receives have one: omit it",
        ("0F0>3",),
    ),
    "known stages and micro-batches": Broken(
        Schedule.from_text("0F0 0B0", "1F0 1B0 7B0"),
        "7B0 is out of range: stages go from 0 to 1, micro-batches and versions start at 0",
        ("7B0",),
    ),
    "replicas side by side": Broken(
        Schedule(Schedule.from_text("0F0 0B0", "1F0 1B0").actions, (0, 1), replicas=(2, 1)),
        "stages with [2, 1] replicas are placed on ranks [0, 1], but each rank must hold one "
        "stage, in the order of the stages: place each stage after the ranks of the previous",
        (),
    ),
    "every rank holds a stage": Broken(
        Schedule.from_text("0F0 0B0", "1F0 1B0", ""),
        "rank 2 holds no stage: place one there, or use fewer ranks",
        (),
    ),
    "on its own rank": Broken(
        Schedule.from_text("0F0 0B0 1B0", "1F0"),
        "1B0 is on rank 0, but its stage is placed on rank 1: move it there",
        ("1B0",),
    ),
    "once": Broken(
        Schedule.from_text("0F0 0B0", "1F0 2F0 2F0 2B0 1B0"),
        "2F0 runs more than once: keep one of them",
        ("2F0", "2F0"),
    ),
    "B, or I and W": Broken(
        Schedule.from_text("0F0 0B0", "1F0 1B0 1W0"),
        "1B0 and 1W0 both run, but B contains I and W: keep B, or I and W",
        ("1B0", "1W0"),
    ),
    "every forward": Broken(
        Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"),
        "1F1 is missing, but 0F1 implies as many micro-batches on every stage: add it",
        ("1B1",),
    ),
    "every gradient": Broken(
        Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1W1"),
        "1I1 is missing, and so is 1B1: add one of them",
        ("1W1",),
    ),
    "activations are released": Broken(
        Schedule.from_text("0F0 0B0", "1F0 1I0"),
        "1W0 is missing, so its activation is never released: add it",
        ("1I0",),
    ),
    "forward before its gradient": Broken(
        Schedule.from_text("0F0 0B0", "1I0 1F0 1W0"),
        "1I0 comes before 1F0, which it needs: swap them",
        ("1I0", "1F0"),
    ),
    "forward before its backward": Broken(
        Schedule.from_text("0F0 0B0", "1B0 1F0"),
        "1B0 comes before 1F0, which it needs: swap them",
        ("1B0", "1F0"),
    ),
    "input gradient before weight gradient": Broken(
        Schedule.from_text("0F0 0B0", "1F0 1W0 1I0"),
        "1W0 comes before 1I0, which it needs: swap them",
        ("1W0", "1I0"),
    ),
    "micro-batches for every replica": Broken(
        Schedule.from_text(
            "0F0@0 0B0@0 0STEP@1 0STEP@2",
            "0STEP@1 0F1@0 0B1@0 0STEP@2",
            "1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1 1STEP@2",
        ),
        "1 micro-batches cannot be shared evenly by the 2 ranks of stage 0: use a multiple of 2 "
        "micro-batches, or other replicas",
        (),
    ),
    "every action has a version": Broken(
        Schedule.from_text("0F0@0 0B0 0STEP@1"),
        "0B0 names no version of its weights, but others do: add it, as in 2F0@1",
        ("0B0",),
    ),
    "the same number of micro-batches for every step": Broken(
        Schedule.from_text("0F0@0 0B0@0 0STEP@1 0F1@1 0B1@1 0F2@1 0B2@1 0STEP@2"),
        "3 micro-batches cannot be shared evenly by 2 steps: use a multiple of 2",
        (),
    ),
    "steps in order": Broken(
        Schedule.from_text("0F0@0 0B0@0 0STEP@2 0F1@0 0B1@0 0STEP@1"),
        "0STEP@2 is found where 0STEP@1 should be: swap them",
        ("0STEP@2",),
    ),
    "every step": Broken(
        Schedule.from_text(
            "0F0@0 0B0@0 0STEP@1 0F1@1 0B1@1 0STEP@2", "1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1"
        ),
        "1STEP@2 is missing on rank 1: add it",
        ("1B1@1",),
    ),
    "weights exist before they are used": Broken(
        Schedule.from_text("0F0@1 0B0@1 0STEP@1"),
        "0F0@1 comes before 0STEP@1, which makes its weights: swap them, or use an older version",
        ("0F0@1",),
    ),
    "gradients use the weights of their forward": Broken(
        Schedule.from_text("0F0@0 0F1@0 0B0@0 0STEP@1 0B1@1 0STEP@2"),
        "0B1@1 uses different weights than 0F1@0: give both the same version",
        ("0F1@0", "0B1@1"),
    ),
    "versions never decrease": Broken(
        Schedule.from_text("0F0@0 0B0@0 0STEP@1 0F1@1 0B1@1 0STEP@2 0F2@0 0B2@0 0STEP@3"),
        "0F2@0 uses older weights than 0F1@1, but these are freed by then: use its version",
        ("0F1@1", "0F2@0"),
    ),
    "mini-batches in order": Broken(
        Schedule.from_text("0F1@0 0F0@0 0B0@0 0STEP@1 0B1@0 0STEP@2"),
        "0F0@0 comes after 0F1@0 of a later mini-batch: swap them",
        ("0F1@0", "0F0@0"),
    ),
    "step after its gradients": Broken(
        Schedule.from_text("0F0@0 0STEP@1 0B0@0"),
        "0B0@0 comes after 0STEP@1, which needs its gradient: swap them",
        ("0STEP@1", "0B0@0"),
    ),
    "step before the next gradients": Broken(
        Schedule.from_text("0F0@0 0F1@0 0B0@0 0B1@0 0STEP@1 0STEP@2"),
        "0B1@0 comes before 0STEP@1, so gradients of two steps would be summed: swap them",
        ("0B1@0",),
    ),
    "no deadlock": Broken(
        Schedule.from_text("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"),
        "ranks 0, 1 wait for each other: 0B0 for 1B0, 1F1 for 0F1: change the order of one of them",
        ("0B0", "1F1"),
    ),
}

FIRST_RANK = "0F0 0RECV_B0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP"
LAST_RANK = "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP"
PROGRAM_BROKEN = {
    "only what the edges require": Broken(
        program(FIRST_RANK, "1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP"),
        "1SEND_F0 belongs to no edge: remove it",
        ("1SEND_F0",),
    ),
    "every message, reduction and step": Broken(
        program("0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP", LAST_RANK), "0RECV_B0 is missing: add it", ()
    ),
    "once": Broken(
        program(FIRST_RANK, "1RECV_F0 1F0 1B0 1SEND_B0 1SEND_B0 1REDUCE_GRAD 1STEP"),
        "1SEND_B0 appears more than once: keep one of them",
        ("1SEND_B0", "1SEND_B0"),
    ),
    "on its own rank": Broken(
        program(f"1REDUCE_GRAD {FIRST_RANK}", "1RECV_F0 1F0 1B0 1SEND_B0 1STEP"),
        "1REDUCE_GRAD is on rank 0, but its stage is placed on rank 1: move it there",
        ("1REDUCE_GRAD",),
    ),
    "sent when made": Broken(
        program("0RECV_B0 0SEND_F0 0F0 0B0 0REDUCE_GRAD 0STEP", LAST_RANK),
        "0SEND_F0 comes before 0F0, which makes it: swap them",
        ("0SEND_F0", "0F0"),
    ),
    "received before it is used": Broken(
        program("0F0 0SEND_F0 0B0 0RECV_B0 0REDUCE_GRAD 0STEP", LAST_RANK),
        "0RECV_B0 comes after 0B0, which needs it: swap them",
        ("0B0", "0RECV_B0"),
    ),
    "received in the order sent": Broken(
        program(
            "0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1 0REDUCE_GRAD 0STEP",
            "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
        ),
        "1RECV_F1 comes before receives of messages that are sent before 0SEND_F1: receive "
        "messages in the order in which they are sent",
        ("1RECV_F1", "1RECV_F0"),
    ),
    "reduced when complete": Broken(
        program("0F0 0RECV_B0 0SEND_F0 0REDUCE_GRAD 0B0 0STEP", LAST_RANK),
        "0B0 comes after 0REDUCE_GRAD, which sums it over replicas: put the reduction after it",
        ("0B0",),
    ),
    "reduced before its step": Broken(
        program("0F0@0 0B0@0 0STEP@1 0REDUCE_GRAD@1"),
        "0REDUCE_GRAD@1 comes after 0STEP@1, which needs it: swap them",
        ("0STEP@1",),
    ),
    "epilogue before its step": Broken(
        program(
            "0F0@0 0B0@0 0REDUCE_GRAD@1 0STEP@1 0UPDATE_STATS@1",
            epilogue=Epilogue(stages_with_stats=(0,)),
        ),
        "0UPDATE_STATS@1 comes after 0STEP@1, which needs it: swap them",
        ("0STEP@1", "0UPDATE_STATS@1"),
    ),
    "nothing after the step": Broken(
        program("0F0 0RECV_B0 0SEND_F0 0B0 0STEP 0REDUCE_GRAD", LAST_RANK),
        "0REDUCE_GRAD comes after 0STEP, the last action of its stage: move it before the step",
        ("0REDUCE_GRAD",),
    ),
    "no deadlock, buffered sends": Broken(
        program("0F0 0RECV_B0 0B0 0SEND_F0 0REDUCE_GRAD 0STEP", LAST_RANK),
        "ranks 0, 1 wait for each other: 0B0 for 1SEND_B0, 1F0 for 0SEND_F0: "
        "change the order of one of them",
        ("0B0", "1F0"),
    ),
    "no deadlock, rendezvous sends": Broken(
        program(
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
        ),
        "ranks 0, 1 wait for each other if sends wait for receives: "
        "0SEND_F1 for 1RECV_F1, 1SEND_B0 for 0RECV_B0: move a receive to an earlier position",
        ("0SEND_F1", "1SEND_B0"),
    ),
    "all ranks in every collective": Broken(
        program(
            "0F0@0 2RECV_F0 0RECV_B0 0SEND_F0 2F0@0 2B0@0 2SEND_B0 2REDUCE_GRAD@1 0B0@0 "
            "0REDUCE_GRAD@1 0REDUCE_TIED@1 2REDUCE_TIED@1 0STEP@1 2STEP@1",
            "1RECV_F0 1F0@0 1RECV_B0 1SEND_F0 1B0@0 1SEND_B0 1REDUCE_GRAD@1 1REDUCE_TIED@1 1STEP@1",
            epilogue=Epilogue(reduces_tied=True),
        ),
        "2REDUCE_TIED@1 is number 2 of its kind on rank 0, but all ranks take part and rank 1 has "
        "1: place as many stages on every rank",
        ("2REDUCE_TIED@1",),
    ),
    "no deadlock, ordered channels": Broken(
        program(
            "0F0 3RECV_F0 0RECV_B0 0SEND_F0 0REDUCE_TIED 3F0 3B0 3SEND_B0 3REDUCE_GRAD 0B0 "
            "0REDUCE_GRAD 0STEP 3STEP",
            "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD "
            "1REDUCE_TIED 1STEP 2STEP",
            epilogue=Epilogue(reduces_tied=True),
        ),
        "ranks 0, 1 wait for each other on ordered channels: 0REDUCE_TIED for 1REDUCE_TIED, "
        "2B0 for 3SEND_B0: change the order of one of them",
        ("0REDUCE_TIED", "2B0"),
    ),
}
every_broken = pytest.mark.parametrize(
    "broken",
    [pytest.param(broken, id=name) for name, broken in BROKEN.items()]
    + [pytest.param(broken, id=f"program: {name}") for name, broken in PROGRAM_BROKEN.items()],
)


def error_of(work: Schedule | Program) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(work)
    return str(caught.value)


def broken_rules(work: Schedule | Program, up_to: str) -> list[str]:
    """Return the names of the broken rules up to one; rules below it may assume that it holds."""
    broken = []
    for rule, facts in rules_for(work):
        if any(rule.find(facts)):
            broken.append(rule.name)
        if rule.name == up_to:
            break
    return broken


def rules_for(work: Schedule | Program) -> Iterator[tuple[Any, Any]]:
    """Yield the rules that apply, each with the facts that it takes."""
    if isinstance(work, Program):
        rules = (*PROGRAM_RULES, *CHANNEL_RULES["directed"])
        yield from ((rule, ProgramFacts(work)) for rule in rules)
        return
    yield from ((rule, ScheduleFacts(work)) for rule in SCHEDULE_RULES)
    if work.is_stream:
        yield from ((rule, StreamFacts(work)) for rule in STREAM_RULES)
    yield from ((rule, ScheduleFacts(work)) for rule in DEADLOCK_RULES)


def test_every_rule_of_all_tables_is_broken_by_an_example() -> None:
    tables = (*SCHEDULE_RULES, *STREAM_RULES, *DEADLOCK_RULES)
    assert [rule.name for rule in tables] == list(BROKEN)
    program_tables = (*PROGRAM_RULES, *CHANNEL_RULES["directed"])
    assert [rule.name for rule in program_tables] == list(PROGRAM_BROKEN)


@every_broken
def test_the_error_of_a_broken_rule_says_what_and_what_to_do(broken: Broken) -> None:
    assert error_of(broken.work).splitlines()[0] == broken.message


@every_broken
def test_the_grid_of_a_broken_rule_marks_the_offending_cells_and_no_others(broken: Broken) -> None:
    _, *grid = error_of(broken.work).splitlines()
    assert sorted(re.findall(r">(\S+)<", "\n".join(grid))) == sorted(broken.marked)
    assert [line[:8] for line in grid] == [f"rank {r} │" for r in range(len(broken.work.actions))]


@pytest.mark.parametrize("name", BROKEN)
def test_an_example_breaks_no_rule_above_its_own(name: str) -> None:
    assert broken_rules(BROKEN[name].work, up_to=name) == [name]


@pytest.mark.parametrize("name", PROGRAM_BROKEN)
def test_an_example_of_a_program_breaks_no_rule_above_its_own(name: str) -> None:
    work = PROGRAM_BROKEN[name].work
    assert isinstance(work, Program)
    check(work.schedule)
    assert broken_rules(work, up_to=name) == [name]


def test_the_program_that_the_broken_ones_are_made_from_is_sound() -> None:
    sound = program(FIRST_RANK, LAST_RANK)
    check(sound)
    assert sound == lower(Schedule.from_text("0F0 0B0", "1F0 1B0"))


def test_what_was_refused_once_is_refused_again() -> None:
    broken = BROKEN["no deadlock"].work
    assert error_of(broken) == error_of(broken)


def test_a_negative_micro_batch_is_out_of_range() -> None:
    actions = [[Action(0, Kind.F, -2), Action(0, Kind.F, 0), Action(0, Kind.B, 0)]]
    message = error_of(Schedule.of(actions, (0,)))
    assert message.startswith("0F-2 is out of range")
    assert ">0F-2<" in message


def test_a_step_of_a_single_micro_batch_is_out_of_range() -> None:
    rows = Schedule.from_text("0F0@0 0B0@0 0STEP@1").actions
    step = rows[0][-1]._replace(microbatch=0)
    message = error_of(Schedule.of([[*rows[0][:-1], step]], (0,)))
    assert message.startswith("0STEP0@1 is out of range")


def test_versions_below_0_are_out_of_range() -> None:
    rows = Schedule.from_text("0F0@0 0B0@0 0STEP@1").actions
    older = [action._replace(version=-5) for action in rows[0][:-1]]
    message = error_of(Schedule.of([[*older, rows[0][-1]]], (0,)))
    assert message.startswith("0F0@-5 is out of range")


@pytest.mark.parametrize("replicas", [(1,), (0, 1), (1, -1), (1, 1, 1)])
def test_replicas_that_are_no_numbers_of_ranks_are_refused(replicas: Any) -> None:
    rows = Schedule.from_text("0F0 0B0", "1F0 1B0").actions
    assert error_of(Schedule(rows, (0, 1), replicas=replicas)).startswith("stages with [")


def test_replicas_that_wait_for_each_others_gradients_are_a_deadlock() -> None:
    """Rank 2 needs 0F2 of rank 0, which first steps with rank 1, which waits for 1B1 of rank 2."""
    message, *grid = error_of(
        Schedule.from_text(
            "0F0@0 0B0@0 0STEP@1 0F2@1 0B2@1 0STEP@2",
            "0F1@0 0B1@0 0STEP@1 0F3@1 0B3@1 0STEP@2",
            "1F0@0 1B0@0 1F1@0 1F2@0 1B1@0 1STEP@1 1B2@0 1F3@1 1B3@1 1STEP@2",
        )
    ).splitlines()
    assert message == (
        "ranks 0, 1, 2 wait for each other: 0STEP@1 for 0REDUCE_GRAD@1, 0B1@0 for 1SEND_B1, "
        "1F2@0 for 0SEND_F2: change the order of one of them"
    )
    assert re.findall(r">(\S+)<", "\n".join(grid)) == ["0STEP@1", "0B1@0", "1F2@0"]


def test_a_deadlock_behind_steps_is_marked_where_it_is() -> None:
    message, *grid = error_of(
        Schedule.from_text(
            "0F0@0 0F1@0 0B0@0 0B1@0 0STEP@1 0F2@1 0B2@1 0F3@1 0B3@1 0STEP@2",
            "1F0@0 1F1@0 1B0@0 1B1@0 1STEP@1 1F3@1 1F2@1 1B2@1 1B3@1 1STEP@2",
        )
    ).splitlines()
    assert message.startswith("ranks 0, 1 wait for each other: 0B2@1 for 1B2@1, 1F3@1 for 0F3@1")
    assert re.findall(r">(\S+)<", "\n".join(grid)) == ["0B2@1", "1F3@1"]


def test_the_grid_shows_the_neighbourhood_of_the_offence_in_a_large_schedule() -> None:
    schedule = build_schedule("1f1b", num_ranks=12, num_microbatches=24)
    rows = [list(row) for row in schedule.actions]
    rows[5].insert(30, rows[5][20])
    message, *grid = error_of(Schedule.of(rows, schedule.placement)).splitlines()
    assert message == f"{rows[5][20]} runs more than once: keep one of them"
    assert [line[:8] for line in grid] == [
        "   ⋮   │", *(f"rank {rank} │" for rank in range(3, 8)), "   ⋮   │"
    ]  # fmt: skip
    assert f">{rows[5][20]}<" in grid[3]
    assert max(map(len, grid)) <= 100


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
@pytest.mark.parametrize("name", schedule_names())
def test_every_family_and_its_program_keep_all_rules(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    check(schedule)
    check(lower(schedule))
