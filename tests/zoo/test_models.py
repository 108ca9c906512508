"""The models have the properties that they are in the zoo for."""

from __future__ import annotations

import pytest
from torch import Tensor

from stageline.model.layers import LayerSequence
from stageline.model.split import cut
from stageline.zoo.cases import CASES, LENGTHS, NUM_MICROBATCHES, make_case
from stageline.zoo.unet import unet


def stages(layers: LayerSequence, num_stages: int) -> list[int]:
    """Return the stage of each layer."""
    return [stage for stage, numbers in enumerate(cut(layers, num_stages)) for _ in numbers]


def boundaries(layers: LayerSequence, name: str, num_stages: int) -> list[int]:
    """Return the number of stage boundaries between the writer of a value and each reader."""
    stage_of_layer = stages(layers, num_stages)
    return [
        stage_of_layer[number] - stage_of_layer[value.writer]
        for number, values in enumerate(layers.sources)
        for value in values
        if value.name == name
    ]


@pytest.mark.parametrize("model", CASES)
def test_there_is_a_layer_for_each_of_two_chunks_on_four_ranks(model: str) -> None:
    assert len(make_case(model).layers) >= 8


@pytest.mark.parametrize("model", CASES)
def test_a_case_is_the_same_each_time_and_shares_no_memory(model: str) -> None:
    first, second = (make_case(model).layers.state_dict() for _ in range(2))
    for name, tensor in first.items():
        assert tensor.equal(second[name])
        assert tensor.data_ptr() != second[name].data_ptr()


def test_batches_are_uneven_and_one_is_too_short() -> None:
    assert any(length % NUM_MICROBATCHES for length in LENGTHS)
    assert min(LENGTHS) < NUM_MICROBATCHES


def test_skips_of_the_unet_cross_three_boundaries_on_four_ranks() -> None:
    layers = make_case("unet").layers
    assert boundaries(layers, "skip.0", 4) == [3]
    assert [boundaries(layers, f"skip.{level}", 8) for level in range(3)] == [[6], [4], [2]]


def test_the_unet_gives_a_class_for_every_pixel() -> None:
    layers, _, ((images, target), *_) = make_case("unet")
    values = {"x": images}
    for layer in layers:
        result = layer.module(*(values[name] for name in layer.reads))
        values |= zip(layer.writes, result if len(layer.writes) > 1 else (result,), strict=True)
    assert values["x"].shape == (len(target), 2, *target.shape[1:])


def test_a_deeper_unet_has_two_more_layers() -> None:
    names = [layer.name for layer in unet(channels=1, classes=2, width=2, depth=4)]
    assert names == [
        *("down.0", "down.1", "down.2", "down.3", "bottom"),
        *("up.3", "up.2", "up.1", "up.0", "head"),
    ]


def test_branches_pass_none_and_a_number_and_a_value_for_three_stages() -> None:
    layers, _, ((inputs, _), *_) = make_case("branches")
    encode = layers.layers[0].module
    memory, bias, length = encode(inputs["source"], inputs["mask"])
    assert isinstance(memory, Tensor)
    assert bias is None
    assert length == 5
    assert boundaries(layers, "memory", 8) == [2, 4, 6]
    assert len(set(boundaries(layers, "memory", 4))) == 3


def test_masked_positions_have_no_effect() -> None:
    layers, _, ((inputs, _), *_) = make_case("branches")
    encode, attend = layers.layers[0].module, layers.layers[2].module
    mask = inputs["source"].new_ones(len(inputs["query"]), 5)
    mask[:, 2:] = 0
    memory, bias, _ = encode(inputs["source"], mask)
    shorter, nothing, _ = encode(inputs["source"][:, :2], None)
    found = attend(inputs["query"], memory, bias, 5, 1.0)
    assert found.allclose(attend(inputs["query"], shorter, nothing, 5, 1.0))
