"""The script of docs/scaling.md, in one process and as two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train.py")


def run(*command: str) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_one_process_and_two_train_to_the_same_bits(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("threads", "processes")]
    starts: tuple[list[str], ...] = ([], ["-m", "stageline", "run", "--num-processes", "2"])
    for folder, start in zip(folders, starts, strict=True):
        told = run(*start, SCRIPT, "--steps", "4", "--folder", str(folder))
        assert told.count("step 4   loss") == 1  # one of the ranks says so
    found, wanted = (load_file(folder / "model.safetensors") for folder in folders)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
