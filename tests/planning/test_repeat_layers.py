"""A deep model's profile from a shallow one's is that which the deep model itself would have."""

from __future__ import annotations

import pytest
import torch

from stageline.errors import PlanError
from stageline.model.layers import Layer, LayerSequence
from stageline.planning.profiling.estimate import estimate
from stageline.planning.profiling.profile_result import Measurement, Profile
from stageline.planning.profiling.repeat_layers import repeat_layers
from stageline.zoo import gpt
from stageline.zoo.amoebanet import NORMAL, Cell, FeatureMap
from stageline.zoo.transformer import transformer


def cells(count: int) -> LayerSequence:
    """AmoebaNet's, that read from the two before them."""
    names = ["x", *(f"cell.{number}" for number in range(count))]
    maps = [FeatureMap(name, 8 if name == "x" else 32, num_halvings=0) for name in names]
    layers = []
    for number in range(count):
        earlier, latest = maps[max(0, number - 1)], maps[number]
        cell, name = Cell(NORMAL, earlier, latest, width=8), names[number + 1]
        layers.append(Layer(name, cell, reads=(earlier.name, latest.name), writes=(name,)))
    return LayerSequence(tuple(layers))


def of_cells(count: int) -> Measurement:
    images = torch.empty(2, 8, 4, 4)
    return estimate(cells(count), images, flops=1e12, bandwidth=1e11, sizes=[2]).at(2)


def of_transformer(num_layers: int) -> Profile:
    layers = transformer(num_layers, vocabulary=16, width=8, heads=2)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return estimate(
        layers, tokens, flops=1e12, bandwidth=1e11, loss_fn=gpt.loss, target=tokens, sizes=[1, 2]
    )


def test_a_transformer_of_five_layers_from_one_of_one() -> None:
    deep = repeat_layers(of_transformer(1), (1, 5, 1))
    assert deep.measurements == of_transformer(5).measurements


@pytest.mark.slow
def test_cells_that_read_from_the_two_before() -> None:
    shallow = estimate(cells(5), torch.empty(2, 8, 4, 4), flops=1e12, bandwidth=1e11, sizes=[2])
    assert repeat_layers(shallow, (1, 1, 3, 1, 1)).at(2) == of_cells(7)


def test_a_layer_with_a_tied_weight_cannot_be_repeated() -> None:
    layers = gpt.gpt(vocabulary=16, width=8, heads=2, blocks=1, context=4)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    shallow = estimate(layers, tokens, flops=1e12, bandwidth=1e11)
    assert repeat_layers(shallow, (1, 2, 2, 1)).tied[0].layers == (0, 5)
    with pytest.raises(PlanError, match="layer 'head' shares a weight with another"):
        repeat_layers(shallow, (1, 1, 1, 2))


@pytest.mark.parametrize("counts", [(1, 1), (1, 0, 1)])
def test_every_layer_needs_a_number(counts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="needs a number of 1 or more for each of 3 layers"):
        repeat_layers(of_transformer(1), counts)
