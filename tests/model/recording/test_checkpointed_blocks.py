"""Gradient checkpointing inside a model: its second run draws the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.model.recording.parity import MODES, Block, Mode, Model, assert_parity, batch, opened
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SPLIT = Mode("zb_h1", "never", "threads")


class Checkpointed(Block):
    """A block that may run in a checkpoint of its own, as those of transformers do."""

    def __init__(self, inside: Callable[..., Any] | None) -> None:
        super().__init__(dropout=0.5)
        self.inside = inside

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) if self.inside is None else self.inside(super().__call__, x)


def reentrant(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


def plain(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def nested(function: Callable[..., Any], x: Tensor) -> Any:
    return plain(lambda y: plain(function, y.sin()), x)


def without(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x)


def without_nested(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x.sin())


@cache
def gradients(inside: Callable[..., Any], mode: Mode) -> dict[str, Tensor | None]:
    class Wrapped(Model):
        def block(self) -> nn.Module:
            return Checkpointed(inside)

    torch.manual_seed(0)
    model = Wrapped()
    inputs, target = batch()
    with opened(model, inputs, mode) as pipe:
        pipe.step(inputs, target)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", [*MODES, SPLIT], ids=lambda mode: mode.schedule)
@pytest.mark.parametrize(
    ("checkpointed", "same"),
    [(plain, without), (nested, without_nested), (reentrant, without)],
)
def test_a_checkpoint_with_dropout_in_it_changes_no_gradient(
    checkpointed: Callable[..., Any], same: Callable[..., Any], mode: Mode
) -> None:
    found, wanted = gradients(checkpointed, mode), gradients(same, mode)
    for name, gradient in found.items():
        expected = wanted[name]
        assert gradient is not None
        assert expected is not None
        assert torch.equal(gradient, expected), name


def test_checkpointed_blocks_train_as_in_a_plain_loop() -> None:
    class Wrapped(Model):
        def block(self) -> nn.Module:
            return Checkpointed(plain)

    assert len(assert_parity(Wrapped)) == 5


def test_checkpointed_blocks_are_verified() -> None:
    class Wrapped(Model):
        def block(self) -> nn.Module:
            return Checkpointed(plain)

    inputs, target = batch()
    with opened(Wrapped(), inputs) as pipe:
        pipe.verify(inputs, target)
