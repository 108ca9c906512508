"""Sound schedules and programs with one thing changed: judged, never crashed upon.

A mutant is either refused with a ScheduleError, or good enough for everything that comes after.
"""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.edges import chain
from stageline.schedules.lower import lower
from stageline.schedules.program import Program
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

Rows = list[list[Action]]
NUMBERS = st.integers(-3, 12) | st.sampled_from([10**6, 10**9, -(10**9)])
CHANGES = ("drop", "duplicate", "swap", "move", "kind", "stage", "microbatch", "peer")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_ranks = draw(st.integers(1, 4))
    return build_schedule(
        draw(st.sampled_from(schedule_names())),
        num_ranks=num_ranks,
        num_microbatches=2 * num_ranks + draw(st.integers(0, 3)),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    schedule = draw(schedules())
    stages = range(schedule.num_stages)
    skips = [(writer, reader) for writer in stages for reader in stages if writer < reader]
    extra = draw(st.lists(st.sampled_from(skips), max_size=2)) if skips else []
    return lower(schedule, [*chain(schedule.num_stages), *extra])


def mutated(draw: st.DrawFn, actions: Sequence[Sequence[Action]], changes: Sequence[str]) -> Rows:
    """The rows with one change, which may be none in effect: a swap of one action with itself."""
    rows = [list(row) for row in actions]
    rank = draw(st.sampled_from(range(len(rows))))
    row = rows[rank]
    position = draw(st.sampled_from(range(len(row))))
    change = draw(st.sampled_from(changes))
    if change == "drop":
        del row[position]
    elif change == "duplicate":
        row.insert(draw(st.integers(0, len(row))), row[position])
    elif change == "swap":
        other = draw(st.sampled_from(range(len(row))))
        row[position], row[other] = row[other], row[position]
    elif change == "move":
        home = rows[draw(st.sampled_from(range(len(rows))))]
        home.insert(draw(st.integers(0, len(home))), row.pop(position))
    else:
        value: Any = draw(st.sampled_from(Kind) if change == "kind" else NUMBERS)
        row[position] = row[position]._replace(**{change: value})
    return rows


@st.composite
def mutant_schedules(draw: st.DrawFn) -> Schedule:
    schedule = draw(schedules())
    return Schedule.of(mutated(draw, schedule.actions, CHANGES), schedule.placement)


@st.composite
def mutant_programs(draw: st.DrawFn) -> Program:
    program = draw(programs())
    rows = mutated(draw, program.actions, CHANGES)
    return Program(tuple(map(tuple, rows)), program.placement, program.edges)


def is_sound(work: Schedule | Program) -> bool:
    try:
        check(work)
    except ScheduleError:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(mutant=mutant_schedules())
def test_a_changed_schedule_is_refused_or_can_be_simulated_and_lowered(mutant: Schedule) -> None:
    if is_sound(mutant):
        assert all(action.kind in COMPUTE for row in mutant.actions for action in row)
        check(lower(mutant))
        assert simulate(mutant).makespan > 0


@settings(max_examples=200, deadline=None)
@given(mutant=mutant_programs())
def test_a_changed_program_is_refused_or_can_be_simulated(mutant: Program) -> None:
    if is_sound(mutant):
        assert simulate(mutant).makespan > 0


@settings(max_examples=100, deadline=None)
@given(program=programs(), data=st.data())
def test_a_program_without_one_of_its_actions_is_refused(
    program: Program, data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from(range(len(program.actions))))
    position = data.draw(st.sampled_from(range(len(program.actions[rank]))))
    rows = [list(row) for row in program.actions]
    del rows[rank][position]
    assert not is_sound(Program(tuple(map(tuple, rows)), program.placement, program.edges))


@settings(max_examples=100, deadline=None)
@given(program=programs(), data=st.data())
def test_a_program_with_an_action_twice_is_refused(program: Program, data: st.DataObject) -> None:
    rows = [list(row) for row in program.actions]
    row = rows[data.draw(st.sampled_from(range(len(rows))))]
    action = data.draw(st.sampled_from(row))
    row.insert(data.draw(st.integers(0, len(row))), action)
    assert not is_sound(Program(tuple(map(tuple, rows)), program.placement, program.edges))
