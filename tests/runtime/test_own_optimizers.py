"""A pipeline that steps its own optimizers gives the bits of a loop that steps one outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

import stageline as sl

Batch = tuple[Tensor, Tensor]
Outcome = tuple[dict[str, Tensor], list[float]]


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def model(*, is_tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    norms = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    middle = norms[0], nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6), norms[1]
    return nn.Sequential(first, *middle, Head(first.weight) if is_tied else last)


def batches() -> Iterator[Batch]:
    """Yield batches of several lengths."""
    torch.manual_seed(3)
    for length in (8, 8, 12, 9):
        yield torch.randn(length, 6), torch.randn(length, 6)


def outcome(layers: nn.Module, losses: list[float]) -> Outcome:
    return {name: tensor.clone() for name, tensor in layers.state_dict().items()}, losses


def stepped_outside(max_norm: float | None, *, is_tied: bool) -> Outcome:
    layers, losses = model(is_tied=is_tied), []
    pipe = sl.Pipeline(layers, mse_loss, num_ranks=1, num_microbatches=4, backend="serial")
    optimizer = SGD(pipe.parameters(), 0.1, momentum=0.9)
    for x, y in batches():
        losses.append(float(pipe.step(x, y).loss))
        if max_norm is not None:
            pipe.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(layers, losses)


def stepped_inside(
    how: str, schedule: str, backend: str, max_norm: float | None, *, is_tied: bool
) -> Outcome:
    layers = model(is_tied=is_tied)
    with sl.Pipeline(
        layers,
        mse_loss,
        num_ranks=2,
        num_microbatches=4,
        schedule=schedule,
        backend=backend,
        optimizer_fn=lambda params: SGD(params, 0.1, momentum=0.9),
        options=sl.Options(max_norm=max_norm),
    ) as pipe:
        if how == "run":
            losses = [float(result.loss) for result in pipe.run(batches())]
        else:
            losses = [float(pipe.step(x, y).loss) for x, y in batches()]
    return outcome(layers, losses)


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("how", "is_tied"),
    [("step", True), ("step", False), ("run", True)],  # untied, `run` clips after the step
)
def test_own_optimizers_give_the_bits_of_one_outside(
    how: str, is_tied: bool, max_norm: float | None, schedule: str, backend: str
) -> None:
    found, losses = stepped_inside(how, schedule, backend, max_norm, is_tied=is_tied)
    wanted, expected = stepped_outside(max_norm, is_tied=is_tied)
    assert losses == expected
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
