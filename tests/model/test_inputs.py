"""Inputs of `step`: one value, or several by the names under which layers read them."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import BatchError
from stageline.model.inputs import named_inputs
from stageline.model.layers import Layer, LayerSequence
from stageline.pipeline import Pipeline


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor, kind: Tensor) -> Tensor:
        out: Tensor = self.linear(x + pos) * mask + kind
        return out


def named() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer("embed", Embed(), ("x", "pos", "mask", "kind")), Layer("head", nn.Linear(3, 3))]


def batch() -> dict[str, Tensor]:
    x, pos = torch.randn(2, 6, 4)
    return {"kind": torch.ones(6, 1), "pos": pos, "x": x, "mask": torch.rand(6, 1)}


class Encoding(UserDict[str, Any]):
    """A mapping like the batches of tokenizers."""


MAPPINGS = [dict, OrderedDict, Encoding, MappingProxyType]


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_any_mapping_gives_inputs_by_name(mapping: Any, backend: str) -> None:
    given, target = batch(), torch.randn(6, 3)
    pipe = Pipeline(named(), mse_loss, num_ranks=2, num_microbatches=3, backend=backend)
    wanted = float(pipe.step(given, target).loss)
    assert float(pipe.step(mapping(given), target).loss) == wanted
    assert float(pipe.step(None, target, **given).loss) == wanted
    x = given.pop("x")
    assert float(pipe.step(x, target, **given).loss) == wanted
    pipe.verify(mapping(given | {"x": x}), target)
    pipe.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_model_that_reads_x_alone_takes_it_by_name(mapping: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    assert float(pipe.step(mapping({"x": x}), y).loss) == float(pipe.step(x, y).loss)
    pipe.eval()
    assert torch.equal(pipe(mapping({"x": x})), pipe(x))
    pipe.verify(mapping({"x": x}), y)


class Whole(nn.Module):
    """A layer that takes its batch as a whole."""

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = batch["tokens"] * batch["scale"]
        return out


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_layer_can_take_a_whole_mapping(mapping: Any) -> None:
    pipe = Pipeline([Whole(), nn.Linear(4, 3)], mse_loss, num_ranks=2, num_microbatches=2)
    whole = mapping({"tokens": torch.randn(4, 4), "scale": torch.rand(4, 1)})
    for inputs in (whole, {"x": whole}):
        pipe.step(inputs, torch.randn(4, 3))
        pipe.verify(inputs, torch.randn(4, 3))
    pipe.close()


@pytest.mark.parametrize(
    ("inputs", "more", "message"),
    [
        (
            batch() | {"labels": 1},
            {},
            "inputs have labels, but layers read only x, pos, mask, kind",
        ),
        (
            torch.ones(6, 4),
            batch(),
            "x is given both in the inputs and by name: give it once",
        ),
        (batch(), {"kind": 1}, "kind is given both in the inputs and by name: give it once"),
        ({}, {"x": 1}, "inputs have x, but layers read pos, mask, kind before any layer writes it"),
        (None, {}, "inputs have x, but layers read pos, mask, kind before"),
        ({0: 1}, batch(), "inputs have 0, but layers read only x, pos, mask, kind"),
    ],
)
def test_inputs_that_do_not_match_what_layers_read_are_an_error(
    inputs: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError) as error:
        named_inputs(LayerSequence.of(named()), inputs, more)
    assert message in str(error.value)


def test_an_input_that_no_layer_reads_is_an_error_beside_x() -> None:
    layers = LayerSequence.of([nn.Linear(4, 3)])
    with pytest.raises(
        BatchError, match=r"inputs have mask, but layers read only x: .*'x': mapping"
    ):
        named_inputs(layers, {"x": 1, "mask": 2})


def test_a_positional_input_that_no_layer_reads_is_an_error() -> None:
    layers = LayerSequence.of([Layer("a", nn.Linear(4, 3), ("tokens",))])
    assert list(named_inputs(layers, None, {"tokens": 1})) == ["tokens"]
    with pytest.raises(BatchError, match="inputs have x, but layers read only tokens"):
        named_inputs(layers, torch.ones(2), {"tokens": 1})
