"""Profiles as values: files, printing, interpolation, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planning.small_layers import (
    tied_embedding,
)

from stageline.errors import PlanError
from stageline.model.layers import Layer, LayerSequence
from stageline.planning.profiling.estimate import estimate
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    TiedParameter,
    ValueCost,
)
from stageline.planning.profiling.repeat_layers import repeat_layers
from stageline.zoo import gpt
from stageline.zoo.amoebanet import NORMAL, Cell, FeatureMap
from stageline.zoo.transformer import transformer


def example() -> Profile:
    def measurement(samples: int, seconds: float) -> Measurement:
        layer = LayerCost(seconds, 2 * seconds, seconds, 100.0 * samples, 60.0 * samples, 40, 8)
        return Measurement(samples, (layer, layer), (ValueCost(0, (1,), 32.0 * samples),))

    return Profile(("a", "b"), (measurement(1, 1.0), measurement(3, 2.0)), device="cpu")


def test_a_profile_is_read_back_from_its_file(tmp_path: Path) -> None:
    measured = profile(tied_embedding(), torch.randint(10, (2, 3)), repeats=1)
    for number, found in enumerate((example(), measured)):
        found.save(tmp_path / f"{number}.json")
        assert Profile.load(tmp_path / f"{number}.json") == found


def test_a_printed_profile_shows_costs_and_spread() -> None:
    first = LayerCost(0.010, 0.008, 0.002, 2**20, 2**20, 2**10, 0, spread=0.001)
    last = LayerCost(0.020, 0.020, 0.040, 0, 0, 2**11, 0)
    found = Profile(("0", "head"), (Measurement(4, (first, last), ()),), device="cpu")
    assert [line.rstrip() for line in str(found).splitlines()] == [
        "a micro-batch of 4 samples, on cpu",
        "layer  forward, ms  backward, ms         activation  parameters",
        "0               10            10  ± 5 %        1MiB        1KiB",
        "head            20            60                 0B        2KiB",
    ]


def test_a_large_spread_of_the_total_time_adds_a_note() -> None:
    def of(short: float, long: float) -> str:
        layers = (
            LayerCost(0.001, 0.001, 0.001, 0, 0, 0, 0, spread=short),
            LayerCost(0.020, 0.020, 0.020, 0, 0, 0, 0, spread=long),
        )
        return str(Profile(("a", "b"), (Measurement(1, layers, ()),)))

    assert "times vary by" not in of(short=0.003, long=0.006)
    assert of(short=0.0, long=0.021).endswith("times vary by ± 33 %: is something else running?")


def test_a_file_without_spreads_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(edited()))
    assert Profile.load(path).measurements[0].layers[0].spread == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LayerCost(-1.0, 1, 1, 1, 1, 1, 1),
            "LayerCost has an invalid forward: input should be greater than or equal to 0",
        ),
        (lambda: LayerCost(1, 1, 1, 1, 1, 1, 1, spread=-1), "LayerCost has an invalid spread"),
        (lambda: LayerCost(1.0), "LayerCost has an invalid input_grad: field required"),  # type: ignore[call-arg]  # meant
        (lambda: ValueCost(-2, (0,), 1), "ValueCost has an invalid writer"),
        (lambda: Measurement(0, (), ()), "Measurement has an invalid samples"),
        (lambda: Measurement(1, ("fast",), ()), r"Measurement has an invalid layers\.0"),  # type: ignore[arg-type]  # meant
        (lambda: TiedParameter((0, 1), float("nan")), "TiedParameter has an invalid parameters"),
        (
            lambda: Profile(("a",), ()),
            r"^measurements are of \[\] samples, but need at least one size",
        ),
        (
            lambda: replace(example(), names=("a",)),
            "^the profile names 1 layers, but has costs of 2",
        ),
    ],
)
def test_invalid_values_are_refused_in_python_too(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_costs_are_interpolated_and_extrapolated_linearly() -> None:
    for samples, seconds in ((1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0)):
        found = example().at(samples)
        layer = found.layers[0]
        assert (found.samples, layer.forward) == (samples, seconds)
        assert (layer.activation, layer.retained) == (100 * samples, 60 * samples)
        assert (layer.parameters, layer.buffers) == (40, 8)
        assert found.values[0].size == 32 * samples


def test_costs_of_a_single_size_are_proportional_to_the_samples() -> None:
    whole = example()
    layer = Profile(whole.names, whole.measurements[1:]).at(6).layers[0]
    assert (layer.forward, layer.activation, layer.parameters) == (4.0, 600, 40)


def edited(**changes: Any) -> Any:
    """Return the example as in a file, with changed costs of its first layer."""
    layer: dict[str, Any] = {
        "forward": 1, "input_grad": 1, "weight_grad": 1, "activation": 1, "retained": 1,
        "parameters": 1, "buffers": 1,
    }  # fmt: skip
    layer = {name: cost for name, cost in (layer | changes).items() if cost is not None}
    return {"names": ["a"], "measurements": [{"samples": 1, "layers": [layer], "values": []}]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (edited(forward=-1), r"forward: .* greater than or equal to 0 \(got -1\)"),
        (edited(forward=float("inf")), r"forward: .* finite"),
        (edited(forward="slow"), r"forward: input should be a number"),
        (edited(forward=None), "forward: field required"),
        (edited(backward=1), "backward: unexpected keyword argument"),
        (edited() | {"names": ["a", "b"]}, "names 2 layers, but has costs of 1"),
        (edited() | {"measurements": []}, "in ascending order"),
        ([], "has an invalid value"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, contents: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(PlanError, match=message):
        Profile.load(path)


def test_a_file_that_is_not_a_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        Profile.load(path)
    path.write_text("forward: 1")
    with pytest.raises(PlanError, match="invalid json"):
        Profile.load(path)


def test_extrapolated_costs_never_decrease() -> None:
    def measured(samples: int, time: float) -> Measurement:
        return Measurement(samples, (LayerCost(time, time, time, 10 * samples, 0, 0, 0),), ())

    noisy = Profile(("a",), (measured(2, 1.1), measured(4, 1.0)))
    assert noisy.at(100).layers[0].forward == 1.0
    assert noisy.at(100).layers[0].activation == 1000


def test_temporary_memory_reuses_what_later_layers_have_freed() -> None:
    layers = (
        LayerCost(1, 1, 1, 10, 0, 0, 0, momentary=9),
        LayerCost(1, 1, 1, 7, 0, 0, 0, momentary=4),
    )
    measurement = Measurement(1, layers, ())
    assert measurement.temporary_bytes(range(2)) == 4
    assert measurement.temporary_bytes(range(1)) == 9


# Repeated layers


def cells(count: int) -> LayerSequence:
    """Return cells of AmoebaNet, which read from the two before them."""
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


def test_a_transformer_of_five_layers_from_the_profile_of_one() -> None:
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
def test_every_layer_needs_a_count(counts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="needs a number from 1 up for each of 3 layers"):
        repeat_layers(of_transformer(1), counts)
