"""Channels run their operations in order: programs that complete, and programs that deadlock."""

import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.simulated_channels import RECEIVES, Issue, Steps, Wait, completes, steps_of
from tests.schedules.test_bounds import random_schedule
from tests.schedules.test_check import program
from tests.schedules.test_lower import any_edges, some_edges
from tests.schedules.test_stream_schedules import STREAMS

from stageline.errors import ScheduleError
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.build import build_schedule
from stageline.schedules.check import check
from stageline.schedules.edges import chain
from stageline.schedules.program.lower import lower
from stageline.schedules.program.lower_period import lower_period
from stageline.schedules.program.program import (
    Epilogue,
    Program,
    receive_of,
)
from stageline.schedules.program.stream import as_stream, unroll
from stageline.schedules.rules.channel_rules import deadlocked_on_channels
from stageline.schedules.rules.program_rules import PROGRAM_RULES, ProgramFacts
from stageline.schedules.rules.rule import enforce
from stageline.schedules.schedule import Schedule


def is_proven(program: Program, *, shared: bool = False) -> bool:
    return not list(
        deadlocked_on_channels(ProgramFacts(program), "shared" if shared else "directed")
    )


def keeps_other_rules(program: Program) -> bool:
    """Return whether a program keeps all rules but those of channels."""
    try:
        check(program.schedule)
        enforce(PROGRAM_RULES, ProgramFacts(program), program.actions)
    except ScheduleError:
        return False
    return True


def refusal(program: Program, **options: Any) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(program, **options)
    return str(caught.value)


class Deadlock(NamedTuple):
    """A program that keeps all other rules, the cycle of its deadlock, and the marked actions."""

    program: Program
    cycle: str
    marked: tuple[str, ...]


class Meeting(NamedTuple):
    """A stream that is legal, a collective in which its ranks cannot meet, and the cycle then."""

    schedule: Schedule
    epilogue: Epilogue
    cycle: str


DEADLOCKS = {
    "a rank sums tied weights before others can come to it": Deadlock(
        program(
            "0F0 3RECV_F0 0RECV_B0 0SEND_F0 0REDUCE_TIED 3F0 3B0 3SEND_B0 3REDUCE_GRAD 0B0 "
            "0REDUCE_GRAD 0STEP 3STEP",
            "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD "
            "1REDUCE_TIED 1STEP 2STEP",
            epilogue=Epilogue(reduces_tied=True),
        ),
        "0REDUCE_TIED for 1REDUCE_TIED, 2B0 for 3SEND_B0",
        ("0REDUCE_TIED", "2B0"),
    ),
    "two collectives in different orders": Deadlock(
        program(
            "0F0 0RECV_B0 0SEND_F0 0B0 0REDUCE_GRAD 0REDUCE_TIED 0CLIP_GRAD 0STEP",
            "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1CLIP_GRAD 1REDUCE_TIED 1STEP",
            epilogue=Epilogue(reduces_tied=True, clips=True),
        ),
        "1CLIP_GRAD for 0CLIP_GRAD behind 0REDUCE_TIED, 0REDUCE_TIED for 1REDUCE_TIED behind "
        "1CLIP_GRAD on the channel of all ranks",
        ("0REDUCE_TIED", "1CLIP_GRAD"),
    ),
    "replicas reduce and gather in different orders": Deadlock(
        program(
            "0F0@0 0B0@0 0REDUCE_GRAD@1 0UPDATE_STATS@1 0STEP@1",
            "0F1@0 0B1@0 0UPDATE_STATS@1 0REDUCE_GRAD@1 0STEP@1",
            epilogue=Epilogue(stages_with_stats=(0,)),
        ),
        "rank 0's 0REDUCE_GRAD@1 for rank 1's 0REDUCE_GRAD@1 behind rank 1's 0UPDATE_STATS@1, "
        "rank 1's 0UPDATE_STATS@1 for rank 0's 0UPDATE_STATS@1 behind rank 0's 0REDUCE_GRAD@1 on "
        "the channel of replicas",
        ("0REDUCE_GRAD@1", "0UPDATE_STATS@1"),
    ),
    "a message is behind one that is sent only after a collective": Deadlock(
        program(
            "0F0 0RECV_B0 0RECV_B1 0SEND_F0 0F1 0SEND_F1 0B1 0B0 0REDUCE_GRAD 0CLIP_GRAD 0STEP",
            "1RECV_F0 1RECV_F1 1F0 1F1 1CLIP_GRAD 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
            epilogue=Epilogue(clips=True),
        ),
        "0B1 for 0RECV_B1 behind 0RECV_B0 on the channel from rank 1 to rank 0, 0RECV_B0 for "
        "1SEND_B0, 1CLIP_GRAD for 0CLIP_GRAD",
        ("0B1", "0RECV_B0", "1CLIP_GRAD"),
    ),
    "a rank clips before a replica that waits for its gradients": Deadlock(
        program(
            "0F0@0 0B0@0 0REDUCE_GRAD@1 0CLIP_GRAD@1 0STEP@1",
            "0F1@0 0B1@0 0CLIP_GRAD@1 0REDUCE_GRAD@1 0STEP@1",
            epilogue=Epilogue(clips=True),
        ),
        "rank 0's 0CLIP_GRAD@1 for rank 1's 0REDUCE_GRAD@1, rank 1's 0CLIP_GRAD@1 for rank 0's "
        "0CLIP_GRAD@1",
        ("0CLIP_GRAD@1", "0CLIP_GRAD@1"),
    ),
    "a rank clips a later mini-batch before a replica that waits for its gradients": Deadlock(
        program(
            "0F0@0 0B0@0 0CLIP_GRAD@1 0REDUCE_GRAD@1 0STEP@1 0F2@1 0B2@1 0CLIP_GRAD@2 "
            "0REDUCE_GRAD@2 0STEP@2",
            "0F1@0 0B1@0 0CLIP_GRAD@1 0CLIP_GRAD@2 0REDUCE_GRAD@1 0STEP@1 0F3@1 0B3@1 "
            "0REDUCE_GRAD@2 0STEP@2",
            epilogue=Epilogue(clips=True),
        ),
        "rank 0's 0STEP@1 for rank 1's 0REDUCE_GRAD@1, rank 1's 0CLIP_GRAD@2 for rank 0's "
        "0CLIP_GRAD@2",
        ("0STEP@1", "0CLIP_GRAD@2"),
    ),
    "a rank of three clips before its forward": Deadlock(
        program(
            "0F0@0 0RECV_B0 0SEND_F0 0B0@0 0REDUCE_GRAD@1 0CLIP_GRAD@1 0STEP@1",
            "0F1@0 0RECV_B1 0SEND_F1 0B1@0 0REDUCE_GRAD@1 0CLIP_GRAD@1 0STEP@1",
            "1RECV_F0 1RECV_F1 1CLIP_GRAD@1 1F0@0 1B0@0 1SEND_B0 1F1@0 1B1@0 1SEND_B1 "
            "1REDUCE_GRAD@1 1STEP@1",
            epilogue=Epilogue(clips=True),
        ),
        "0B0@0 for 1SEND_B0, 1CLIP_GRAD@1 for rank 0's 0CLIP_GRAD@1",
        ("0B0@0", "1CLIP_GRAD@1"),
    ),
}
MEETINGS = {
    "rank 1 steps only after it has received what rank 0 sends after its own step": Meeting(
        Schedule.from_text(
            "0F0@0 0B0@0 0STEP@1 0F1@1 0B1@1 0STEP@2 0F2@2 0B2@2 0STEP@3",
            "1F0@0 1B0@0 1F1@0 1STEP@1 1B1@0 1F2@1 1STEP@2 1B2@1 1STEP@3",
        ),
        Epilogue(clips=True),
        "0CLIP_GRAD@1 for 1CLIP_GRAD@1, 1F1@0 for 0SEND_F1",
    ),
    "a replica needs, before its statistics, what waits for the other's step": Meeting(
        Schedule.from_text(
            "0F1@0 0B1@0 0F0@0 0B0@0 0STEP@1 0F3@1 0B3@1 0F2@1 0B2@1 0STEP@2 0F5@2 0B5@2 0F4@2 "
            "0B4@2 0STEP@3",
            "1F0@0 1B0@0 1F2@0 1STEP@1 1B2@0 1F4@1 1STEP@2 1B4@1 1STEP@3",
            "1F1@0 1B1@0 1STEP@1 1F3@1 1B3@1 1STEP@2 1F5@2 1B5@2 1STEP@3",
        ),
        Epilogue(stages_with_stats=(1,)),
        "0B3@1 for 1SEND_B3, rank 2's 1UPDATE_STATS@1 for rank 1's 1UPDATE_STATS@1, "
        "1F2@0 for 0SEND_F2",
    ),
}
every_deadlock = pytest.mark.parametrize("name", DEADLOCKS)


@every_deadlock
def test_a_deadlock_on_ordered_channels_is_refused_with_its_cycle(name: str) -> None:
    work, cycle, marked = DEADLOCKS[name]
    message, *grid = refusal(work).splitlines()
    _, found = message.split(" wait for each other on ordered channels: ")
    assert found == f"{cycle}: change the order of one of them"
    assert sorted(re.findall(r">(\S+)<", "\n".join(grid))) == sorted(marked)


@every_deadlock
def test_no_other_rule_refuses_a_program_that_deadlocks_on_channels(name: str) -> None:
    work, _, _ = DEADLOCKS[name]
    assert keeps_other_rules(work)
    assert not any(completes(steps_of(work), Random(seed)) for seed in range(10))


def test_a_deadlock_may_be_due_to_the_order_of_channels_alone() -> None:
    """If channels carried out whatever is there at both ends, the program would complete."""
    work, _, _ = DEADLOCKS["replicas reduce and gather in different orders"]
    assert all(completes(steps_of(work), Random(seed), ordered=False) for seed in range(10))


def test_ranks_that_hold_several_stages_may_meet_once_for_each_of_them() -> None:
    check(
        program(
            "0F0@0 1F0@0 1RECV_B0 1SEND_F0 1B0@0 1REDUCE_GRAD@1 0B0@0 0REDUCE_GRAD@1 "
            "0REDUCE_TIED@1 1REDUCE_TIED@1 0STEP@1 1STEP@1",
            "2RECV_F0 2F0@0 3F0@0 3B0@0 3REDUCE_GRAD@1 2B0@0 2SEND_B0 2REDUCE_GRAD@1 "
            "2REDUCE_TIED@1 3REDUCE_TIED@1 2STEP@1 3STEP@1",
            epilogue=Epilogue(reduces_tied=True),
        )
    )


@pytest.mark.parametrize("name", MEETINGS)
def test_a_stream_whose_ranks_cannot_meet_is_refused(name: str) -> None:
    schedule, epilogue, cycle = MEETINGS[name]
    check(lower(schedule))
    program = lower(schedule, epilogue=epilogue)
    assert keeps_other_rules(program)
    assert f" wait for each other on ordered channels: {cycle}: " in refusal(program)
    assert not completes(steps_of(program), Random(0))
    with pytest.raises(ScheduleError, match="on ordered channels"):
        lower_period(schedule, program.edges, epilogue)


def test_a_lowered_program_deadlocks_if_both_directions_share_a_channel() -> None:
    program = lower(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    check(program)
    message, *grid = refusal(program, channels="shared").splitlines()
    assert message == (
        "ranks 0, 1 wait for each other if both directions share a channel: 1RECV_F0 for 0SEND_F0 "
        "behind 0RECV_B0, 0RECV_B0 for 1SEND_B0 behind 1RECV_F0 on the channel of ranks 0 and 1: "
        "use a channel for each direction, or change the order of one of them"
    )
    assert grid == [
        "rank 0 │  0F0  >0RECV_B0<  0SEND_F0   0F1   0RECV_B1   0SEND_F1   0B0  …",
        "rank 1 │ >1RECV_F0<  1RECV_F1   1F0   1B0   1SEND_B0   1F1  …",
    ]
    assert completes(steps_of(program), Random(0))
    assert not completes(steps_of(program, shared=True), Random(0))


def test_a_program_is_checked_for_each_kind_of_channels_once_it_is_asked_for() -> None:
    patient = program(
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0STEP",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP",
    )
    eager = lower(patient.schedule)
    for _ in range(2):
        check(patient, channels="shared")
        check(eager, channels="directed")
        assert "share a channel" in refusal(eager, channels="shared")
    deadlocked, _, _ = DEADLOCKS["two collectives in different orders"]
    for _ in range(2):
        assert "on ordered channels" in refusal(deadlocked, channels="shared")
        assert "on ordered channels" in refusal(deadlocked)


@pytest.mark.parametrize("channels", ["both", "", None, 2, ["shared"]])
def test_unknown_channels_are_refused(channels: Any) -> None:
    program = lower(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    message = f"channels is {channels!r}, but has to be 'directed' or 'shared'"
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        check(program, channels=channels)


def test_a_schedule_has_no_messages_that_could_share_channels() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match=r"^channels is 'shared', but a schedule has no mess"):
        check(schedule, channels="shared")


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_completes_on_ordered_channels_with_all_that_its_ranks_do_together(
    stream: str,
) -> None:
    schedule = build_schedule(**STREAMS[stream])
    edges = some_edges(schedule.num_stages, Random(0))
    program = lower(schedule, edges, stream_epilogue(schedule))
    check(program)
    assert completes(steps_of(program), Random(0))


@pytest.mark.parametrize("stream", STREAMS)
def test_the_period_that_the_runtime_repeats_completes_on_ordered_channels(stream: str) -> None:
    """In it a receive is posted where its mini-batch begins, behind the sends of the one before."""
    schedule = build_schedule(**STREAMS[stream])
    edges = some_edges(schedule.num_stages, Random(1))
    epilogue = stream_epilogue(schedule)
    period = lower_period(schedule, edges, epilogue)
    for count in (1, 2, 7):
        rows = unroll(period, count).actions
        check(Program(rows, period.placement, period.edges, "", period.replicas, epilogue))


def stream_epilogue(schedule: Schedule) -> Epilogue:
    """Return all that the ranks of a stream do together; with chunks they cannot sum and clip."""
    meets = schedule.num_stages <= schedule.num_ranks
    return Epilogue(meets, tuple(range(schedule.num_stages)), meets)


PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 2, 1), (0, 1, 2, 2, 1, 0)]


@settings(max_examples=150, deadline=None)
@given(
    placement=st.sampled_from([*PLACEMENTS, (0, 1, 0, 0), (1, 0, 2, 0, 1)]),
    num_microbatches=st.integers(1, 4),
    num_minibatches=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_any_legal_order_completes_on_ordered_channels_when_it_is_lowered(
    placement: tuple[int, ...], num_microbatches: int, num_minibatches: int, seed: int
) -> None:
    rng = Random(seed)
    schedule = random_schedule(placement, num_microbatches, rng)
    edges = rng.choice([some_edges, any_edges])(schedule.num_stages, rng)
    epilogue = Epilogue(
        reduces_tied=True, stages_with_stats=(0, schedule.num_stages - 1), clips=True
    )
    if num_minibatches:
        schedule = as_stream(schedule, num_minibatches)
        epilogue = stream_epilogue(schedule)
    check(lower(schedule, edges, epilogue))


def small_program(rng: Random) -> Program:
    """Return a lowered program, some of whose messages and collectives were moved elsewhere."""
    if rng.random() < 0.4:
        replicas = rng.choice([None, (2, 1), (1, 2), (2, 1, 1)])
        schedule = build_schedule(
            "pipedream",
            num_ranks=sum(replicas) if replicas else rng.randint(2, 3),
            num_microbatches=2 if replicas else rng.randint(1, 2),
            num_minibatches=rng.randint(1, 3),
            replicas=replicas,
        )
    else:
        schedule = random_schedule(rng.choice(PLACEMENTS[1:]), rng.randint(1, 3), rng)
    edges = rng.choice([chain(schedule.num_stages), some_edges(schedule.num_stages, rng)])
    epilogue = Epilogue(rng.random() < 0.5, (0, 1), rng.random() < 0.5)
    program = lower(schedule, edges, epilogue)
    rows = [[*row] for row in program.actions]
    if rng.random() < 0.5:
        _receive_late(program, rows)
    for _ in range(rng.randint(0, 3)):
        row = rng.choice(rows)
        action = rng.choice([a for a in row if a.kind not in (*COMPUTE, Kind.STEP)])
        row.remove(action)
        row.insert(rng.randint(0, len(row)), action)
    return replace(program, actions=tuple(map(tuple, rows)))


def _receive_late(program: Program, rows: list[list[Action]]) -> None:
    """Move every receive to the action that needs its message."""
    for row in rows:
        for receive in [action for action in row if action.kind in RECEIVES]:
            row.remove(receive)
            reader = next(a for a in row if receive in needed_by(program, a))
            row.insert(row.index(reader), receive)


def needed_by(program: Program, action: Action) -> list[Action]:
    """Return the receives whose messages an action needs."""
    sends = program.routes.awaited(action) if action.kind in COMPUTE else []
    return [*map(receive_of, sends)]


def test_the_rule_agrees_with_channels_that_are_simulated_in_random_order() -> None:
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for seed in range(600):
        rng = Random(seed)
        program = small_program(rng)
        if not keeps_other_rules(program):
            continue
        for shared in (False, True):
            proven = is_proven(program, shared=shared)
            assert completes(steps_of(program, shared=shared), rng) == proven, seed
            verdicts[shared, proven] += 1
        if is_proven(program):
            assert completes(receiving_ahead(steps_of(program)), rng), seed
        if not has_collectives(program):
            assert is_proven(program), seed  # the other rules leave nothing for messages alone
    assert min(verdicts.values()) > 20
    assert len(verdicts) == 4


def receiving_ahead(rows: Steps) -> Steps:
    """Return steps of hosts that run ahead of their devices, as far as collectives allow."""
    found: Steps = []
    for row in rows:
        ahead = 0
        found.append([])
        for step in row:
            if isinstance(step, Issue) and step.is_receive:
                found[-1].insert(ahead, step)
                ahead += 1
            else:
                found[-1].append(step)
                is_blocking = isinstance(step, Wait) and not isinstance(step.meeting, Action)
                ahead = len(found[-1]) if is_blocking else ahead
    return found


def has_collectives(program: Program) -> bool:
    kinds = (Kind.REDUCE_TIED, Kind.CLIP_GRAD, Kind.UPDATE_STATS)
    return any(action.kind in kinds for row in program.actions for action in row)
