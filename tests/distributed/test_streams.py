"""Streams over real processes."""

from __future__ import annotations

import pytest
from tests.distributed.launch import launch


@pytest.mark.parametrize(
    ("num_ranks", "count"),
    [
        (3, 7),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 8), (4, 5))),
    ],
)
def test_streams_over_processes_leave_the_bits_of_the_plain_program_and_end_cleanly(
    num_ranks: int, count: int
) -> None:
    for ended in launch("streams", num_ranks, timeout=100.0):
        assert ended.output.splitlines() == [f"{count} streams equal", "left open"], ended.output
        assert ended.code == 1


def test_ranks_that_hold_the_same_stage_agree_on_weights_that_its_layers_share() -> None:
    for ended in launch("tied_siblings", 3, timeout=60.0):
        assert ended.output.splitlines() == ["the same weights"], ended.output
        assert ended.code == 0
