"""`PipelineAccelerator`: what it does in place of accelerate, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl

pytest.importorskip("accelerate")

from stageline.integrations.accelerate import PipelineAccelerator
from stageline.integrations.single_process import single_process


@pytest.fixture
def pipe() -> Iterator[sl.Pipeline]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with sl.Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=2) as made:
        yield made


def test_a_model_is_not_prepared(pipe: sl.Pipeline) -> None:
    accelerator = PipelineAccelerator(pipe, cpu=True)
    with pytest.raises(sl.ModelError, match="prepare was given a Sequential, but the pipeline has"):
        accelerator.prepare(pipe.model)


def test_gradients_are_clipped_with_all_ranks(pipe: sl.Pipeline) -> None:
    accelerator = PipelineAccelerator(pipe, cpu=True)
    pipe.step(torch.ones(4, 4), torch.full((4, 1), 9.0))
    norm = accelerator.clip_grad_norm_(pipe.parameters(), 0.5)
    assert norm > 0.5
    total = nn.utils.get_total_norm([p.grad for p in pipe.parameters() if p.grad is not None])
    assert float(total) == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(sl.ModelError, match="was given 1 parameters and norm_type 2, but clips"):
        accelerator.clip_grad_norm_([next(pipe.parameters())], 0.5)


def test_a_loss_outside_of_the_pipeline_goes_backward(pipe: sl.Pipeline) -> None:
    accelerator = PipelineAccelerator(pipe, cpu=True)
    accelerator.backward(pipe(torch.ones(4, 4)).square().mean())
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize("name", ["save_state", "load_state"])
def test_checkpoints_are_left_to_stageline(name: str, pipe: sl.Pipeline) -> None:
    with pytest.raises(sl.ModelError, match=f"{name} was called, but the model is in the pipeline"):
        getattr(PipelineAccelerator(pipe, cpu=True), name)("folder")


def test_accumulation_is_left_to_microbatches(pipe: sl.Pipeline) -> None:
    with pytest.raises(sl.ModelError, match="gradient_accumulation_steps is 2, but pipe"):
        PipelineAccelerator(pipe, cpu=True, gradient_accumulation_steps=2)


def test_variables_of_a_launcher_are_hidden_and_come_back(monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with single_process():
        assert not {"LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()
    assert os.environ["WORLD_SIZE"] == "1"


def test_launched_processes_without_a_group_are_refused(
    pipe: sl.Pipeline, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sl.ModelError, match="a launcher has started 2 processes, but there is no"):
        PipelineAccelerator(pipe, cpu=True)
