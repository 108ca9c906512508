"""Killed at random points, started again by torchrun; `benchmarks/kills.py` kills twenty times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.kills import train_through

from stageline.runs.read import read_run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_that_was_killed_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    killed = list(train_through(tmp_path / "disturbed", 120, kills=1, longest=2.0, seed=1))
    assert len(killed) == 1
    assert not list(train_through(tmp_path / "calm", 120, kills=0))
    found, wanted = (
        load_file(tmp_path / name / "model.safetensors") for name in ("disturbed", "calm")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    run = read_run(tmp_path / "disturbed")
    assert (run.status, run.step, run.environment.num_processes) == ("finished", 120, 2)
    assert run.notes == ()
