"""Schedules of several mini-batches: rules, periods, files and warm-up."""

from pathlib import Path
from typing import Any

import pytest

from stageline.errors import ScheduleError
from stageline.schedules.action import Action, Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.program.lower import lower
from stageline.schedules.program.stream import find_period, unroll
from stageline.schedules.rules.program_rules import ProgramFacts, deadlocked
from stageline.schedules.schedule import Schedule

STREAMS: dict[str, dict[str, Any]] = {
    "pipedream": {"name": "pipedream", "num_ranks": 4, "num_microbatches": 1},
    "pipedream, one rank": {"name": "pipedream", "num_ranks": 1, "num_microbatches": 1},
    "pipedream, m = 3": {"name": "pipedream", "num_ranks": 4, "num_microbatches": 3},
    "vertical sync": {
        "name": "pipedream",
        "num_ranks": 3,
        "num_microbatches": 2,
        "vertical_sync": True,
    },
    "2bw": {"name": "pipedream_2bw", "num_ranks": 4, "num_microbatches": 4},
    "2bw, m = 7": {"name": "pipedream_2bw", "num_ranks": 4, "num_microbatches": 7},
    "replicas 3 1": {
        "name": "pipedream",
        "num_ranks": 4,
        "num_microbatches": 3,
        "replicas": [3, 1],
    },
    "replicas 1 2 2": {
        "name": "pipedream",
        "num_ranks": 5,
        "num_microbatches": 4,
        "replicas": [1, 2, 2],
        "vertical_sync": True,
    },
    "2bw, replicas 2 2": {
        "name": "pipedream_2bw",
        "num_ranks": 4,
        "num_microbatches": 4,
        "replicas": [2, 2],
    },
} | {
    f"{name}, streamed": {
        "name": name,
        "num_ranks": 3,
        "num_microbatches": 6,
        "num_minibatches": 3,
    }
    for name in schedule_names(synchronous=True)
}
every_stream = pytest.mark.parametrize("stream", STREAMS)


def built(stream: str, **options: Any) -> Schedule:
    return build_schedule(**(STREAMS[stream] | options))


@every_stream
def test_a_stream_and_its_program_keep_all_rules(stream: str) -> None:
    """The last rules are the absence of deadlocks, also with rendezvous sends."""
    schedule = built(stream)
    check(schedule)
    program = lower(schedule)
    check(program)
    assert not list(deadlocked(ProgramFacts(program), rendezvous=True))
    assert program.schedule == schedule


@every_stream
def test_the_period_of_a_stream_gives_it_at_any_length(stream: str) -> None:
    schedule = built(stream)
    period = find_period(schedule)
    for count in (schedule.num_minibatches, 1, 2, 13):
        assert unroll(period, count) == built(stream, num_minibatches=count)


@every_stream
def test_a_stream_that_is_written_and_read_is_the_same(stream: str, tmp_path: Path) -> None:
    schedule = built(stream)
    schedule.to_csv(tmp_path / "stream.csv")
    read = Schedule.from_csv(tmp_path / "stream.csv")
    assert read == schedule
    assert read.replicas == schedule.replicas
    lower(schedule).to_csv(tmp_path / "program.csv")
    assert Schedule.from_csv(tmp_path / "program.csv") == schedule


@every_stream
def test_a_stream_has_the_sizes_asked_for(stream: str) -> None:
    schedule = built(stream, num_minibatches=5)
    per_minibatch = STREAMS[stream]["num_microbatches"]
    assert (schedule.num_minibatches, schedule.num_microbatches) == (5, per_minibatch)
    assert schedule.total_microbatches == 5 * per_minibatch
    assert schedule.is_stream


@every_stream
def test_every_rank_steps_each_of_its_stages_once_a_mini_batch(stream: str) -> None:
    schedule = built(stream, num_minibatches=4)
    for rank, row in enumerate(schedule.actions):
        for stage in schedule.stages_of(rank):
            steps = [a.version for a in row if a.stage == stage and a.kind is Kind.STEP]
            assert steps == [1, 2, 3, 4]


def test_a_file_of_a_stream_names_versions_behind_an_at(tmp_path: Path) -> None:
    schedule = build_schedule("pipedream", num_ranks=2, num_microbatches=1, num_minibatches=2)
    schedule.to_csv(tmp_path / "stream.csv")
    assert (tmp_path / "stream.csv").read_text() == (
        "0F0@0,0F1@0,0B0@0,0STEP@1,0B1@0,0STEP@2\n1F0@0,1B0@0,1STEP@1,1F1@1,1B1@1,1STEP@2\n"
    )


def test_a_lowered_stream_reduces_before_every_step_and_asks_mini_batch_by_mini_batch() -> None:
    schedule = build_schedule("pipedream", num_ranks=2, num_microbatches=1, num_minibatches=2)
    first, last = (" ".join(map(str, row)) for row in lower(schedule).actions)
    assert first == (
        "0F0@0 0RECV_B0 0SEND_F0 0F1@0 0RECV_B1 0SEND_F1 0B0@0 0REDUCE_GRAD@1 0STEP@1 "
        "0B1@0 0REDUCE_GRAD@2 0STEP@2"
    )
    assert last == (
        "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1REDUCE_GRAD@1 1STEP@1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 "
        "1REDUCE_GRAD@2 1STEP@2"
    )


def test_a_synchronous_stream_uses_the_weights_of_all_steps_before() -> None:
    schedule = build_schedule("zbv", num_ranks=3, num_microbatches=6, num_minibatches=4)
    for row in schedule.actions:
        for action in row:
            if action.kind is not Kind.STEP:
                assert action.version == action.microbatch // 6


@pytest.mark.parametrize("name", schedule_names(synchronous=True))
def test_the_first_mini_batch_of_a_synchronous_stream_is_the_schedule_itself(name: str) -> None:
    once = build_schedule(name, num_ranks=3, num_microbatches=6)
    stream = build_schedule(name, num_ranks=3, num_microbatches=6, num_minibatches=2)
    for row, whole in zip(once.actions, stream.actions, strict=True):
        first = [Action(a.stage, a.kind, a.microbatch) for a in whole if 0 <= a.microbatch < 6]
        assert tuple(first) == row


def test_what_repeats_nothing_has_no_period() -> None:
    schedule = Schedule.from_text("0F0@0 0F1@0 0B0@0 0STEP@1 0B1@0 0STEP@2 0F2@2 0B2@2 0STEP@3")
    check(schedule)
    with pytest.raises(ScheduleError, match=r"^this schedule of 3 mini-batches repeats no period"):
        find_period(schedule)


def test_its_sizes_are_part_of_how_a_stream_shows_itself() -> None:
    schedule = build_schedule("pipedream_2bw", num_ranks=2, num_microbatches=4, num_minibatches=6)
    assert repr(schedule) == (
        "Schedule('pipedream_2bw', num_ranks=2, num_stages=2, num_microbatches=4, "
        "num_minibatches=6)"
    )
