"""How operations run again: values are let go of, modes are entered, hooks are left alone."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.model.recording.parity import Model, batch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.recording.recorded_model import RecordedModel, record_model


def outputs(recorded: RecordedModel, inputs: Tensor) -> Any:
    """Run all layers of a recorded model."""
    values = recorded.prepare(inputs, {})
    for layer in recorded.layers:
        result = layer.module(*(values[name] for name in layer.reads))
        values |= zip(layer.writes, layer.written(result), strict=True)
    return values[layer.writes[0]]


class Owner:
    """An object of no tensors, that counts."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self.seen: list[Any] = []


class Watched(torch.autograd.Function):
    """Counts the values of earlier calls that somebody still has."""

    @staticmethod
    def forward(_: Any, x: Tensor, owner: Any) -> Tensor:
        owner.alive.append(sum(ref() is not None for ref in owner.seen))
        result = x * 2.0
        owner.seen.append(weakref.ref(result))
        return result


class Chain(nn.Module):
    """Ten values, each of which is needed for the next one only."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(4, 4), owner

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        for _ in range(10):
            x = Watched.apply(x, self.owner) + 1.0  # type: ignore[no-untyped-call]
        return x


def test_a_value_is_released_after_its_last_use() -> None:
    owner = Owner()
    recorded = record_model(Chain(owner), torch.zeros(2, 4), {})
    owner.alive.clear()
    owner.seen.clear()
    with torch.no_grad():
        outputs(recorded, torch.zeros(2, 4))
    assert len(owner.alive) == 10
    assert max(owner.alive) == 0


class Modes(Model):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
        return self.head(x.float())


def test_a_mode_of_the_forward_does_not_switch_gradients_on() -> None:
    model = Modes().eval()
    recorded = record_model(model, batch()[0], {})
    with torch.no_grad():
        found = outputs(recorded, batch()[0])
        assert not found.requires_grad
        assert torch.equal(found, model(batch()[0]))


class Taken(Model):
    """A hook takes what a part of each block returns, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda *_: taken.clear())
        for block in self.blocks:
            block.norm.register_forward_hook(lambda *given: taken.append(given[-1]))  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found + sum(each.mean() for each in taken)


taken: list[Tensor] = []


def test_tensors_that_hooks_take_out_of_layers_are_followed() -> None:
    model = Taken().eval()
    recorded = record_model(model, batch()[0], {})
    found = outputs(recorded, batch(seed=1)[0])
    assert torch.equal(found, model(batch(seed=1)[0]))
    assert all(len(part._forward_hooks) <= 1 for part in model.modules())


def test_a_layer_that_returns_another_number_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            return self.linear(x), self.count

    class Counting(Model):
        def block(self) -> nn.Module:
            return Counts()

        def apply_block(self, x: Tensor, block: Any) -> Tensor:
            y, count = block(x)
            result: Tensor = y * count
            return result

    model = Counting()
    recorded = record_model(model, batch()[0], {})
    outputs(recorded, batch()[0])
    with pytest.raises(
        ModelError, match=r"blocks.0 returned other things.*\[2\] instead of.*\[1\]"
    ):
        outputs(recorded, batch()[0])
