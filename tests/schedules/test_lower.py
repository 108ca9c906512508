"""The actions that lowering adds to a schedule; no send ever waits for its receive."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.edges import Edge, chain
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import (
    RECEIVE_KIND,
    Epilogue,
    Program,
    program_tasks,
    receive_of,
)
from stageline.schedules.schedule import Schedule
from stageline.schedules.task_graph import LaneTimes, run_lanes

MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
every_name = pytest.mark.parametrize("name", schedule_names())
every_synchronous = pytest.mark.parametrize("name", schedule_names(synchronous=True))


def some_edges(num_stages: int, rng: Random) -> list[Edge]:
    """Return the chain and two values that skip stages, if there are enough stages."""
    skips = [(w, r) for w in range(num_stages) for r in range(w + 2, num_stages)]
    return [*chain(num_stages), *rng.sample(skips, min(2, len(skips)))]


def any_edges(num_stages: int, rng: Random) -> list[Edge]:
    pairs = [(w, r) for r in range(num_stages) for w in range(r)]
    return rng.sample(pairs, rng.randint(0, len(pairs)))


def position(program: Program, action: Action) -> int:
    """Return the position of an action in the row of its rank."""
    return program.actions[program.placement[action.stage]].index(action)


def test_a_lowered_pair_of_ranks_written_out() -> None:
    program = lower(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    assert [" ".join(map(str, row)) for row in program.actions] == [
        "0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1 0REDUCE_GRAD 0STEP",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
    ]


def test_the_epilogue_of_a_model_stands_before_the_steps_of_each_rank() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=2)
    epilogue = Epilogue(reduces_tied=True, stages_with_stats=(1, 2), clips=True)
    program = lower(schedule, epilogue=epilogue)
    check(program)
    assert [" ".join(map(str, row[-6:])) for row in program.actions] == [
        "0REDUCE_GRAD 0REDUCE_TIED 2UPDATE_STATS 0CLIP_GRAD 0STEP 2STEP",
        "1REDUCE_GRAD 1REDUCE_TIED 1UPDATE_STATS 1CLIP_GRAD 1STEP 3STEP",
    ]


def test_in_a_stream_running_statistics_are_updated_before_the_step_of_their_stage() -> None:
    schedule = build_schedule("pipedream", num_ranks=2, num_microbatches=1)
    program = lower(schedule, epilogue=Epilogue(stages_with_stats=(1,)))
    check(program)
    rows = [[str(action) for action in row] for row in program.actions]
    updates = [i for i, action in enumerate(rows[1]) if "UPDATE_STATS" in action]
    assert len(updates) == schedule.num_minibatches
    assert all(rows[1][i + 1] == rows[1][i].replace("UPDATE_STATS", "STEP") for i in updates)
    assert not any("UPDATE_STATS" in action for action in rows[0])


def test_a_receive_is_asked_for_no_earlier_than_the_sender_is_known_to_have_come_so_far() -> None:
    """Rank 1 sends 1SEND_B0 after it received 0F1; rank 2 sends 2SEND_B0 after only 1F0."""
    program = lower(build_schedule("1f1b", num_ranks=3, num_microbatches=2))
    ends = "1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD 1STEP"
    assert [" ".join(map(str, row)) for row in program.actions] == [
        "0F0 0SEND_F0 0F1 0RECV_B0 0RECV_B1 0SEND_F1 0B0 0B1 0REDUCE_GRAD 0STEP",
        f"1RECV_F0 1RECV_F1 1F0 1RECV_B0 1SEND_F0 1F1 1RECV_B1 1SEND_F1 {ends}",
        "2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 2B1 2SEND_B1 2REDUCE_GRAD 2STEP",
    ]


def test_a_receive_follows_what_led_to_its_message_by_way_of_other_ranks() -> None:
    """Stages 0 and 3 are on rank 0: what 2F0 sends to 3 began as 0F0, what 1B0 sends as 3B0."""
    program = lower(Schedule.from_text("0F0 3F0 3B0 0B0", "1F0 1B0", "2F0 2B0"))
    assert " ".join(map(str, program.actions[0])) == (
        "0F0 3RECV_F0 0SEND_F0 3F0 3B0 0RECV_B0 3SEND_B0 3REDUCE_GRAD 0B0 0REDUCE_GRAD 0STEP 3STEP"
    )


def test_the_diagram_in_the_docstring_of_lowering_is_what_it_writes() -> None:
    import stageline.schedules.program.insert_communication as module  # noqa: PLC0415  its text is the subject

    drawn = re.findall(r"rank \d │ (.*?)(?:  .*)?$", module.__doc__ or "", flags=re.MULTILINE)
    program = lower(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    kinds = COMPUTE | MESSAGES
    assert drawn == [
        " ".join(str(action) for action in row if action.kind in kinds) for row in program.actions
    ]


@every_name
def test_compute_stays_as_it_was(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6)
    program = lower(schedule)
    assert program.schedule == schedule
    assert program.name == schedule.name == name


@every_name
def test_each_crossing_edge_has_each_message_once_a_micro_batch(name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
    edges = some_edges(schedule.num_stages, Random(0))
    counts = Counter(a for row in lower(schedule, edges).actions for a in row if a.kind in MESSAGES)
    expected = {
        Action(stage, kind, i, peer)
        for writer, reader in edges
        if schedule.placement[writer] != schedule.placement[reader]
        for i in range(schedule.total_microbatches)
        for stage, kind, peer in (
            (writer, Kind.SEND_F, reader),
            (reader, Kind.RECV_F, writer),
            (reader, Kind.SEND_B, writer),
            (writer, Kind.RECV_B, reader),
        )
    }
    assert counts == dict.fromkeys(expected, 1)


def test_nothing_is_sent_between_stages_on_one_rank() -> None:
    """Stages 1 and 2 share a rank: the middle of the V."""
    program = lower(Schedule.from_text("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"))
    messages = {str(a) for row in program.actions for a in row if a.kind in MESSAGES}
    assert messages == {
        "0SEND_F0", "1RECV_F0", "2SEND_F0", "3RECV_F0",
        "3SEND_B0", "2RECV_B0", "1SEND_B0", "0RECV_B0",
    }  # fmt: skip


def test_a_single_rank_sends_nothing() -> None:
    program = lower(build_schedule("zbv", num_ranks=1, num_microbatches=3))
    assert not [a for row in program.actions for a in row if a.kind in MESSAGES]


def test_a_skip_goes_straight_to_its_reader() -> None:
    schedule = build_schedule("gpipe", num_ranks=4, num_microbatches=1)
    added = [
        set(long) - set(plain)
        for long, plain in zip(
            lower(schedule, [*chain(4), (0, 3)]).actions, lower(schedule).actions, strict=True
        )
    ]
    assert [sorted(map(str, row)) for row in added] == [
        ["0RECV_B0>3", "0SEND_F0>3"],
        [],
        [],
        ["3RECV_F0>0", "3SEND_B0>0"],
    ]


def test_stages_that_read_nothing_of_each_other_exchange_nothing() -> None:
    schedule = build_schedule("gpipe", num_ranks=3, num_microbatches=1)
    rows = lower(schedule, [(0, 2)]).actions
    assert [str(a) for a in rows[1]] == ["1F0", "1B0", "1REDUCE_GRAD", "1STEP"]


def test_an_edge_given_twice_is_one_edge() -> None:
    schedule = build_schedule("gpipe", num_ranks=3, num_microbatches=2)
    assert lower(schedule, [*chain(3), *chain(3)]) == lower(schedule)


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 4), (-1, 1), (4, 5)])
def test_an_edge_to_an_earlier_or_unknown_stage_is_rejected(edge: Edge) -> None:
    schedule = build_schedule("gpipe", num_ranks=4, num_microbatches=2)
    message = (
        f"edge {edge} is invalid: give (writer, reader), a stage and a later one, both from 0 to 3"
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        lower(schedule, [*chain(4), edge])


def test_a_schedule_that_breaks_a_rule_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match=r"^1F0 is missing, but 0F0 implies "):
        lower(Schedule.of(Schedule.from_text("0F0 0B0", "1B0 1F1 1B1").actions[:1], (0, 0)))


@every_name
def test_a_message_is_sent_right_behind_its_maker_and_asked_for_before_its_reader(
    name: str,
) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
    program = lower(schedule, some_edges(schedule.num_stages, Random(1)))
    routes = program.routes
    for row in schedule.actions:
        for action in row:
            made = position(program, action)
            for send in routes.sends(action):
                behind = program.actions[program.placement[send.stage]][
                    made + 1 : position(program, send)
                ]
                assert all(other.kind in MESSAGES for other in behind)
            for send in routes.awaited(action):
                assert position(program, receive_of(send)) < made


@every_name
def test_a_stage_is_reduced_right_after_the_last_weight_gradient_of_a_mini_batch(name: str) -> None:
    program = lower(build_schedule(name, num_ranks=3, num_microbatches=6))
    is_stream = program.schedule.is_stream
    reductions = 0
    for row in program.actions:
        for place, action in enumerate(row):
            if action.kind is Kind.REDUCE_GRAD:
                *_, last = (a for a in row[:place] if a.kind in COMPUTE)
                assert (last.stage, last.kind in (Kind.W, Kind.B)) == (action.stage, True)
                own = range(6) if not is_stream else range(6 * action.version)[-6:]
                assert last.microbatch == own[-1]
                reductions += 1
    assert reductions == len(program.placement) * program.schedule.num_minibatches


@every_synchronous
def test_a_rank_ends_with_one_step_for_each_of_its_stages(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6)
    for rank, row in enumerate(lower(schedule).actions):
        stages = schedule.stages_of(rank)
        assert row[-len(stages) :] == tuple(Action(stage, Kind.STEP) for stage in stages)
        assert Kind.STEP not in {action.kind for action in row[: -len(stages)]}


def run_at_random(program: Program, rng: Random, *, rendezvous: bool) -> LaneTimes:
    """Run with random times, which may be 0; messages do not take time of their rank."""
    delays = {a: rng.choice([0.0, rng.random(), 9.0]) for row in program.actions for a in row}
    tasks = program_tasks(program, delays.__getitem__, rendezvous=rendezvous)
    durations = [rng.choice([0.0, rng.random(), 5.0]) for _ in range(tasks.num_tasks)]
    for row, lane in zip(program.actions, tasks.lanes, strict=False):
        for action, task in zip(row, lane, strict=True):
            if action.kind in MESSAGES:
                durations[task] = 0.0
    run = run_lanes(tasks.lanes, durations, tasks.dependencies)
    assert run.is_complete(tasks.lanes)
    return run


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(schedule_names(synchronous=True)),
    p=st.integers(1, 5),
    beyond=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_in_no_timing_does_a_send_of_a_single_step_wait_for_its_receive(
    name: str, p: int, beyond: int, seed: int
) -> None:
    schedule = build_schedule(name, num_ranks=p, num_microbatches=2 * p + beyond)
    rng = Random(seed)
    edges = rng.choice([some_edges, any_edges])(schedule.num_stages, rng)
    program = lower(schedule, edges)
    run = run_at_random(program, Random(seed), rendezvous=True)
    assert run.starts == run_at_random(program, Random(seed), rendezvous=False).starts
    assert not list(sends_that_wait(program, run))


def sends_that_wait(program: Program, run: LaneTimes) -> Iterator[Action]:
    """Yield sends that start later than the end of the actions before them on their rank."""
    tasks = program_tasks(program, lambda _: 0.0)
    for row, lane in zip(program.actions, tasks.lanes, strict=False):
        for (before, task), action in zip(pairwise(lane), row[1:], strict=True):
            if action.kind in RECEIVE_KIND and run.starts[task] > run.ends[before]:
                yield action


def test_a_fast_rank_of_a_stream_waits_until_the_next_has_begun_its_mini_batch() -> None:
    program = lower(build_schedule("pipedream", num_ranks=2, num_microbatches=1, num_minibatches=3))
    tasks = program_tasks(program, lambda _: 0.0, rendezvous=True)
    durations = [0.0] * tasks.num_tasks
    for action, task in zip(program.actions[1], tasks.lanes[1], strict=True):
        durations[task] = float(action.kind in COMPUTE)
    run = run_lanes(tasks.lanes, durations, tasks.dependencies)
    assert [str(send) for send in sends_that_wait(program, run)] == ["0SEND_F1", "0SEND_F2"]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["pipedream", "pipedream_2bw", "1f1b", "zbv", "interleaved_1f1b"]),
    p=st.integers(1, 4),
    count=st.integers(1, 5),
    replicated=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_send_of_a_stream_waits_only_for_a_rank_that_has_not_begun_its_mini_batch(
    name: str, p: int, count: int, replicated: bool, seed: int
) -> None:
    """It is not known earlier whether there is another mini-batch, so a send may wait."""
    replicas = [p, 1] if replicated and name.startswith("pipedream") else None
    schedule = build_schedule(
        name,
        num_ranks=p + 1 if replicas else p,
        num_microbatches=2 * p,
        num_minibatches=count,
        replicas=replicas,
    )
    program = lower(schedule, some_edges(schedule.num_stages, Random(seed)))
    run = run_at_random(program, Random(seed), rendezvous=True)
    for send in sends_that_wait(program, run):
        row = program.actions[program.routes.rank_of(send.peer, send.microbatch)]
        behind = row[row.index(receive_of(send)) :]
        upcoming = next(a for a in behind if a.kind in COMPUTE)
        begun = {a.microbatch // (2 * p) for a in row[: -len(behind)] if a.kind is Kind.F}
        own = send.microbatch // (2 * p)
        assert (upcoming.kind, upcoming.microbatch // (2 * p)) == (Kind.F, own)
        assert own not in begun


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "1f1b"])
def test_a_stream_asks_for_nothing_of_a_mini_batch_that_it_has_not_come_to(name: str) -> None:
    program = lower(build_schedule(name, num_ranks=4, num_microbatches=4, num_minibatches=6))
    for row in program.actions:
        first = {a.microbatch // 4: i for i, a in reversed([*enumerate(row)]) if a.kind is Kind.F}
        for place, action in enumerate(row):
            if action.kind in RECEIVE_KIND.values() and action.microbatch >= 4:
                ahead = row[place : first[action.microbatch // 4]]
                assert not [a for a in ahead if a.kind in COMPUTE or a.kind is Kind.STEP]


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(schedule_names()), p=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_any_edges_give_a_program_that_keeps_all_rules(name: str, p: int, seed: int) -> None:
    schedule = build_schedule(name, num_ranks=p, num_microbatches=2 * p)
    check(lower(schedule, any_edges(schedule.num_stages, Random(seed))))


def test_receives_moved_behind_the_sends_before_their_readers_can_make_a_send_wait() -> None:
    """Later receives satisfy all other rules, but can make a send wait."""
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
    ]
    lowered = lower(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    names = {str(action): action for row in lowered.actions for action in row}
    late = tuple(tuple(names[cell] for cell in row.split()) for row in rows)
    with pytest.raises(ScheduleError, match="if sends wait for receives"):
        check(Program(late, lowered.placement, lowered.edges))


@pytest.mark.parametrize(
    "edges", [[("a", "b")], [0, 1], [(0, 1, 2)], [(0, 1.5)], [(0, 5)], [(1, 0)]]
)
def test_edges_that_are_no_pairs_of_stages_are_refused(edges: Any) -> None:
    sound = lower(Schedule.from_text("0F0 0B0", "1F0 1B0"))
    with pytest.raises(ScheduleError, match=r"^edge .* is invalid"):
        lower(sound.schedule, edges)
    with pytest.raises(ScheduleError, match=r"^edge .* is invalid"):
        check(Program(sound.actions, sound.placement, tuple(edges)))
