"""Messages between simulated devices in processes, over ordered channels with random delays."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.launch import Ended, launch

import stageline as sl


def over_channels(worker: str, num_ranks: int, *arguments: str, **limits: Any) -> list[Ended]:
    """Launch a worker as if its ranks were devices; each channel is late now and then."""
    return launch("over_channels", num_ranks, "1", worker, *arguments, **limits)


@pytest.mark.parametrize(
    "num_ranks",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_every_schedule_has_the_bits_of_a_plain_loop_however_late_messages_are(
    num_ranks: int,
) -> None:
    for ended in launch("channel_parity", num_ranks, "1", "1"):
        assert ended.code == 0, ended.output
        lines = [f"{name}: 1 seeds, differs with []" for name in sl.schedule_names()]
        assert sorted(ended.output.splitlines()) == sorted(lines)


@pytest.mark.parametrize(
    ("num_ranks", "count"),
    [
        (2, 8),
        pytest.param(3, 7, marks=pytest.mark.slow),
        pytest.param(4, 5, marks=pytest.mark.slow),
    ],
)
def test_streams_over_channels_leave_the_bits_of_the_plain_program(
    num_ranks: int, count: int
) -> None:
    for ended in over_channels("streams", num_ranks):
        assert ended.output.splitlines() == [f"{count} streams equal", "left open"], ended.output
        assert ended.code == 1


@pytest.mark.parametrize(
    ("worker", "num_ranks", "arguments", "said"),
    [
        ("values", 2, [], "all equal"),
        ("mesh", 4, ["dp,pp"], "equal but for rounding"),
        pytest.param("mesh", 4, ["pp,tp"], "equal but for rounding", marks=pytest.mark.slow),
        pytest.param("containers", 2, [], "6 containers equal", marks=pytest.mark.slow),
        pytest.param("borders", 3, ["3", "aliased"], "verified", marks=pytest.mark.slow),
        pytest.param("tied_siblings", 3, [], "the same weights", marks=pytest.mark.slow),
        pytest.param("schedules", 3, ["memory"], "14 schedules equal", marks=pytest.mark.slow),
        pytest.param("endurance", 3, ["30", "80"], "no growth", marks=pytest.mark.slow),
    ],
)
def test_what_passes_between_ranks_over_channels_is_what_passes_through_the_host(
    worker: str, num_ranks: int, arguments: list[str], said: str
) -> None:
    for ended in over_channels(worker, num_ranks, *arguments):
        assert ended.code == 0, ended.output
        assert said in ended.output, ended.output


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_the_first_step_nothing_passes_through_the_host(num_replicas: int) -> None:
    for ended in launch("on_device", 2 * num_replicas, str(num_replicas)):
        assert ended.code == 0, ended.output
        assert ended.output.splitlines() == ["nothing on the host"]


def test_a_message_of_a_new_form_is_refused_and_a_batch_may_be_overwritten_after_its_step() -> None:
    for ended in launch("message_forms", 2):
        assert ended.code == 0, ended.output
        assert ended.output.splitlines() == ["told"]


@pytest.mark.slow
def test_layers_move_between_ranks_whose_messages_go_over_channels(tmp_path: Path) -> None:
    for ended in over_channels("replanning", 2, str(tmp_path), "parity"):
        assert ended.code == 0, ended.output
        assert "parity is done" in ended.output


def test_a_layer_that_raises_ends_every_rank_with_one_error() -> None:
    for ended in over_channels("failing", 3, "raise"):
        assert ended.code == 1
        assert "rank 1 failed in layer 'trouble' at 1F2 (forward, micro-batch 2)" in ended.output
        assert "ValueError: a layer of the user's own" in ended.output
        assert "never reached" not in ended.output


@pytest.mark.parametrize("others", [[], pytest.param(["replicas"], marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named_by_the_others_at_once(others: list[str]) -> None:
    ends = over_channels("failing", 3, "SIGKILL", *others)
    assert ends[1].code == -signal.SIGKILL
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        name = "rank 0 of replica 1" if others else "rank 1"
        assert f"{name} is gone: its connection broke" in ended.output


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_named_with_where_everyone_stands() -> None:
    ends = over_channels("failing", 3, "SIGSTOP", timeout=25.0, stopped=[1])
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        assert "has waited 4 s for" in ended.output
        assert "silent for" in ended.output
