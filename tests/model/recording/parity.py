"""A small model whose forward tests vary, and its comparison with the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from benchmarks.models.reference import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.runtime.batches import microbatches

WIDTH, NUM_SAMPLES, NUM_MICROBATCHES = 8, 5, 2
Batch = tuple[Any, Any]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        return x + self.drop(functional.gelu(self.linear(self.norm(x))))


class Model(nn.Module):
    """Three blocks; tests override how a block is made, or how it is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return Block()

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        result: Tensor = block(x)
        return result

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = self.apply_block(x, block)
        return self.head(x)


class Mode(NamedTuple):
    schedule: str
    recompute: str
    backend: str


MODES = (Mode("1f1b", "never", "threads"), Mode("gpipe", "always", "serial"))


def batch(length: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed + length)
    inputs = torch.randn(NUM_SAMPLES, length, 5, generator=generator)
    return inputs, torch.randn(NUM_SAMPLES, length, 3, generator=generator)


def loss(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def assert_parity(
    make: Callable[[], nn.Module],
    mode: Mode = MODES[0],
    batches: Sequence[Batch] = (),
    loss_fn: Any = loss,
) -> list[str]:
    """Compare the losses, gradients and buffers of steps with a plain loop; return the layers."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    batches = batches or [batch(), batch(6, seed=1)]
    with opened(model, batches[0][0], mode, loss_fn) as pipe:
        layers = {
            layer.name: [name for name, _ in layer.module.named_parameters(remove_duplicate=False)]
            for layer in pipe.layers
        }
        for step, (inputs, target) in enumerate(copy.deepcopy(list(batches))):
            found = float(pipe.step(inputs, target).loss)
            expected = plain_step(plain, batches[step], loss_fn, layers, step)
            assert abs(found - expected) < 1e-4
            assert_equal(model, plain)
            model.zero_grad()
            plain.zero_grad()
    return list(layers)


def opened(model: nn.Module, inputs: Any, mode: Mode = MODES[0], loss_fn: Any = loss) -> Pipeline:
    return Pipeline(
        model,
        loss_fn,
        example_inputs=inputs,
        num_ranks=2,
        num_microbatches=NUM_MICROBATCHES,
        schedule=mode.schedule,
        recompute=mode.recompute,
        backend=mode.backend,
        options=Options(batch_norm="microbatch"),
    )


def plain_step(
    plain: nn.Module, given: Batch, loss_fn: Any, layers: dict[str, list[str]], step: int
) -> float:
    sizes = microbatches.sizes(NUM_SAMPLES, NUM_MICROBATCHES)
    parts = microbatches.cut(copy.deepcopy(given), sizes)
    weights = [size / NUM_SAMPLES for size in sizes]
    losses = plain_losses(plain, parts, weights, loss_fn, layers, step=step)
    return sum(float(each) * weight for each, weight in zip(losses, weights, strict=True))


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        assert parameter.grad is None or wanted is None or torch.equal(parameter.grad, wanted), name
    buffers = dict(plain.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
