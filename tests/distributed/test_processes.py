"""Real processes over gloo: the bits of one process, and failures that speak."""

from __future__ import annotations

import signal

import pytest
from tests.distributed.launch import launch


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_schedule_trains_to_the_bits_of_one_process(num_ranks: int) -> None:
    for ended in launch("schedules", num_ranks):
        assert ended.code == 0, ended.output
        assert "14 schedules equal" in ended.output


def test_a_layer_that_raises_ends_every_rank_with_one_error() -> None:
    ends = launch("failing", 3, "raise")
    for ended in ends:
        assert ended.code == 1
        assert "rank 1 failed in layer 'trouble' at 1F2 (forward, micro-batch 2)" in ended.output
        assert "ValueError: a layer of the user's own" in ended.output
        assert "never reached" not in ended.output
    assert "in forward" in ends[1].output  # the traceback of the layer, where it happened


def test_a_rank_that_is_killed_is_named_by_the_others() -> None:
    ends = launch("failing", 3, "SIGKILL")
    assert ends[1].code == -signal.SIGKILL
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        assert "rank 1 is gone: its connection broke" in ended.output
        assert "rank 1 at " in ended.output


def test_a_rank_that_stops_answering_is_named_with_where_everyone_stands() -> None:
    ends = launch("failing", 3, "SIGSTOP", timeout=25.0)
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        assert "has waited 4 s for" in ended.output
        assert "rank 1 at " in ended.output
        assert "silent for" in ended.output
    assert ends[1].code == -signal.SIGKILL  # it never woke up
