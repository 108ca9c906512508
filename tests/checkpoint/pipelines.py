"""Pipelines and optimizers that the tests of checkpoints share."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import stageline as sl
from stageline.checkpoint.pipeline_state import schedulers_of
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss


def model(width: int = 8, blocks: int = 3) -> nn.Sequential:
    """Tied weights in the first and the last layer, dropout, and statistics with a counter."""
    embedding = nn.Embedding(11, width)
    middle = [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.LayerNorm(width))
        for _ in range(blocks)
    ]
    return nn.Sequential(embedding, *middle, nn.BatchNorm1d(5), Head(embedding))


def pipeline(num_ranks: int = 2, *, init: int = 0, **options: Any) -> sl.Pipeline:
    torch.manual_seed(init)
    options = {"backend": "serial", "num_microbatches": 4, "seed": init, **options}
    return sl.Pipeline(model(), loss, num_ranks=num_ranks, **grouped(options))


def train(pipe: sl.Pipeline, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, 11, (2, 9, 5), generator=generator)
        pipe.step(x, y)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


Everything = dict[str, Any]


def everything(pipe: sl.Pipeline, optimizer: Optimizer | None) -> Everything:
    """Return copies of all that a load may change."""
    found: Everything = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    found |= {"random": torch.get_rng_state(), "counts": [pipe.num_steps, pipe._session.seed]}
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        state = deepcopy(each.state_dict())
        for index, group in enumerate(state["param_groups"]):
            found |= {f"{number} group {index} {key}": value for key, value in group.items()}
        for index, kept in state["state"].items():
            found |= {f"{number} state {index} {key}": value for key, value in kept.items()}
    for number, scheduler in enumerate(schedulers_of(pipe)):
        found[f"scheduler {number}"] = deepcopy(scheduler.state_dict())
    return found


def assert_same(found: Everything, wanted: Everything) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, wanted[name]), name
        else:
            assert value == wanted[name], name


def adamw(pipe: sl.Pipeline) -> Optimizer:
    weights = [p for p in pipe.parameters() if p.ndim > 1]
    others = [p for p in pipe.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, 1e-2)


def sgd(pipe: sl.Pipeline) -> Optimizer:
    return SGD(pipe.parameters(), lr=torch.tensor(0.1), momentum=0.9)
