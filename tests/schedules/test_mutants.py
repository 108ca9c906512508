"""Valid schedules and programs with one change: `check` accepts or rejects them, and never crashes.

A mutant is either refused with a ScheduleError, or good enough for everything that comes after.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.schedules.action import Action, Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.edges import chain
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import Program
from stageline.schedules.schedule import Schedule, is_scheduled
from stageline.simulation.simulate import simulate

Rows = list[list[Action]]
NUMBERS = st.integers(-3, 12) | st.sampled_from([10**6, 10**9, -(10**9)])
CHANGES = ("drop", "duplicate", "swap", "move", "kind", "stage", "microbatch", "peer", "version")
COPIES = (None, None, (1, 1), (2, 1), (1, 2), (2, 1, 1), (3, 1))  # replicas of stages


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_ranks = draw(st.integers(1, 4))
    return build_schedule(
        draw(st.sampled_from(schedule_names())),
        num_ranks=num_ranks,
        num_microbatches=2 * num_ranks + draw(st.integers(0, 3)),
    )


@st.composite
def streams(draw: st.DrawFn) -> Schedule:
    replicas = draw(st.sampled_from(COPIES))
    num_ranks = sum(replicas) if replicas else draw(st.integers(1, 4))
    names = ("pipedream", "pipedream_2bw") if replicas else ("pipedream", "pipedream_2bw", "zb_h1")
    return build_schedule(
        draw(st.sampled_from(names)),
        num_ranks=num_ranks,
        num_microbatches=6 if replicas else num_ranks,
        num_minibatches=draw(st.integers(1, 4)),
        replicas=replicas,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    schedule = draw(schedules() | streams())
    stages = range(schedule.num_stages)
    skips = [(writer, reader) for writer in stages for reader in stages if writer < reader]
    extra = draw(st.lists(st.sampled_from(skips), max_size=2)) if skips else []
    return lower(schedule, [*chain(schedule.num_stages), *extra])


def mutated(draw: st.DrawFn, actions: Sequence[Sequence[Action]], changes: Sequence[str]) -> Rows:
    """Draw rows with one change, possibly without effect: a swap of an action with itself."""
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
    schedule = draw(schedules() | streams())
    rows = mutated(draw, schedule.actions, CHANGES)
    return replace(schedule, actions=tuple(map(tuple, rows)))


@st.composite
def mutant_programs(draw: st.DrawFn) -> Program:
    program = draw(programs())
    rows = mutated(draw, program.actions, CHANGES)
    return replace(program, actions=tuple(map(tuple, rows)))


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
        assert all(is_scheduled(action) for row in mutant.actions for action in row)
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
    assert not is_sound(replace(program, actions=tuple(map(tuple, rows))))


@settings(max_examples=100, deadline=None)
@given(program=programs(), data=st.data())
def test_a_program_with_an_action_twice_is_refused(program: Program, data: st.DataObject) -> None:
    rows = [list(row) for row in program.actions]
    row = rows[data.draw(st.sampled_from(range(len(rows))))]
    action = data.draw(st.sampled_from(row))
    row.insert(data.draw(st.integers(0, len(row))), action)
    assert not is_sound(replace(program, actions=tuple(map(tuple, rows))))


@settings(max_examples=100, deadline=None)
@given(stream=streams(), data=st.data())
def test_a_stream_without_one_of_its_actions_is_refused(
    stream: Schedule, data: st.DataObject
) -> None:
    rows = [list(row) for row in stream.actions]
    row = rows[data.draw(st.sampled_from(range(len(rows))))]
    del row[data.draw(st.sampled_from(range(len(row))))]
    assert not is_sound(replace(stream, actions=tuple(map(tuple, rows))))


@settings(max_examples=100, deadline=None)
@given(stream=streams(), data=st.data(), change=st.sampled_from([-2, -1, 1, 2, 10**9]))
def test_a_stream_in_which_one_action_has_another_version_is_refused(
    stream: Schedule, data: st.DataObject, change: int
) -> None:
    """A gradient must use the version of its forward, and a step must make the next one."""
    rows = [list(row) for row in stream.actions]
    row = rows[data.draw(st.sampled_from(range(len(rows))))]
    position = data.draw(st.sampled_from(range(len(row))))
    row[position] = row[position]._replace(version=row[position].version + change)
    assert not is_sound(replace(stream, actions=tuple(map(tuple, rows))))


@settings(max_examples=100, deadline=None)
@given(stream=streams(), data=st.data())
def test_a_step_moved_past_a_gradient_of_its_stage_is_refused(
    stream: Schedule, data: st.DataObject
) -> None:
    """The gradient would be missing from one sum, or be added to another."""
    rows = [list(row) for row in stream.actions]
    row = rows[data.draw(st.sampled_from(range(len(rows))))]
    steps = [i for i, action in enumerate(row) if action.kind is Kind.STEP]
    old = data.draw(st.sampled_from(steps))
    new = data.draw(st.integers(0, len(row) - 1))
    step = row[old]
    passed = row[new:old] if new < old else row[old + 1 : new + 1]
    row.insert(new, row.pop(old))
    gradients = [a for a in passed if a.stage == step.stage and a.kind in (Kind.B, Kind.W)]
    assert not gradients or not is_sound(replace(stream, actions=tuple(map(tuple, rows))))
