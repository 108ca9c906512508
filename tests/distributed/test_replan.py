"""Layers that move between real processes, with all that training left of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.launch import launch


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_goes_on_with_the_same_bits_when_layers_move(
    tmp_path: Path, num_ranks: int
) -> None:
    run(tmp_path, num_ranks, "parity")


@pytest.mark.slow
def test_a_slow_process_sheds_layers_by_what_was_measured(tmp_path: Path) -> None:
    run(tmp_path, 2, "device")


@pytest.mark.slow
def test_replicas_move_the_same_layers_and_keep_their_bits(tmp_path: Path) -> None:
    run(tmp_path, 4, "replicas")


@pytest.mark.slow
def test_a_checkpoint_that_is_saved_after_a_move_loads_on_other_stages(tmp_path: Path) -> None:
    run(tmp_path, 3, "saved")


@pytest.mark.slow
def test_what_has_left_a_process_takes_no_memory_there(tmp_path: Path) -> None:
    run(tmp_path, 2, "memory")


def test_what_is_wrong_on_one_rank_is_told_on_all_and_nothing_moves(tmp_path: Path) -> None:
    run(tmp_path, 2, "refused")


def run(folder: Path, num_ranks: int, task: str) -> None:
    for ended in launch("replanning", num_ranks, str(folder), task):
        assert ended.code == 0, ended.output
        assert f"{task} is done" in ended.output
