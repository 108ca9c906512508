"""Checkpoints of real processes: saved on four, loaded on one, two and three."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.launch import launch
from tests.distributed.workers import checkpoints

import stageline as sl


def test_what_four_processes_saved_goes_on_with_any_number_of_them(tmp_path: Path) -> None:
    run(tmp_path, 4, "save", "mesh")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        *("dp", "step-00000003", "tp")
    ]
    wanted = checkpoints.unstopped(8)
    for num_ranks in (2, 3):
        run(tmp_path, num_ranks, "load")
    run(tmp_path, 4, "replicas")
    pipe, optimizer = checkpoints.pipeline(checkpoints.model(), 2, backend="threads")
    assert sl.load(tmp_path, pipe, optimizer).step == 3
    checkpoints.train(pipe, optimizer, range(3, 8))
    checkpoints.assert_same(wanted, checkpoints.tensors(pipe, optimizer))
    pipe.close()
    os.umask(umask := os.umask(0))
    for name in ("model", "model-2", "model-3"):
        path = tmp_path / f"{name}.safetensors"
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        plain = checkpoints.model()
        plain.load_state_dict(load_file(path))
        checkpoints.assert_same(plain.state_dict(), wanted)


def test_a_damaged_checkpoint_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    run(tmp_path, 2, "damaged")


def run(folder: Path, num_ranks: int, *tasks: str) -> None:
    for ended in launch("checkpoints", num_ranks, str(folder), *tasks):
        assert ended.code == 0, ended.output
        for task in tasks:
            assert f"{task} is done" in ended.output


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
