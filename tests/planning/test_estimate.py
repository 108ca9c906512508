"""`sl.estimate` and `sl.measure_rates`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.small_layers import (
    WIDTH,
    linear,
    memory_of_layers,
)
from torch import Tensor, nn

from stageline.errors import PlanError
from stageline.planning.profiling.estimate import estimate
from stageline.planning.profiling.measure_rates import measure_rates
from stageline.planning.profiling.profile import profile
from stageline.zoo.cases import CASES, make_case


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("gpt", "unet") else n for n in CASES],
)
def test_estimated_bytes_equal_measured_bytes(name: str) -> None:
    case = make_case(name)
    inputs, target = case.batches[0]
    options: dict[str, Any] = {"loss_fn": case.loss_fn, "target": target, "sizes": [2, 4]}
    measured = profile(case.layers, inputs, repeats=1, **options)
    estimated = estimate(case.layers, inputs, flops=1e12, bandwidth=1e11, **options)
    assert estimated.names == measured.names
    assert estimated.tied == measured.tied
    for a, b in zip(estimated.measurements, measured.measurements, strict=True):
        assert memory_of_layers(a) == memory_of_layers(b)
        assert a.values == b.values
        assert [x.parameters + x.buffers for x in a.layers] == [
            x.parameters + x.buffers for x in b.layers
        ]


def test_an_estimate_needs_no_memory_for_the_model() -> None:
    """The model has a hundred billion parameters."""
    side = 2**18
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(side, side, bias=False), nn.Linear(side, 4, bias=False))
        sample = torch.empty(8, side)
    first, last = estimate(model, sample, flops=1e14, bandwidth=1e12, sizes=[8]).at(8).layers
    assert first.parameters == 4 * side**2
    assert first.forward == pytest.approx((4 * side**2 + 2 * 4 * 8 * side) / 1e12)  # its bytes
    assert first.input_grad == 0  # the loader wants no gradient
    assert first.weight_grad > 3 * first.forward  # written, then read and added to what is there
    assert last.input_grad > 0


def test_an_estimate_counts_the_flops_of_attention() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    sample = torch.empty(2, 4, 64, 16, device="meta")
    layer = estimate([Attend()], sample, flops=1e9, bandwidth=1e15, sizes=[2]).at(2).layers[0]
    assert layer.forward == pytest.approx(2 * 2 * 4 * 64 * 64 * (16 + 16) / 1e9)


def test_a_layer_that_depends_on_data_cannot_be_estimated() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(PlanError, match=r"layer '0' failed(.|\n)*an estimate has only shapes"):
        estimate([Looks()], torch.ones(2, 2), flops=1e12, bandwidth=1e11)


def test_invalid_rates_are_refused() -> None:
    with pytest.raises(PlanError, match="bandwidth is 0, but has to be a number above 0"):
        estimate([linear()], torch.ones(2, WIDTH), flops=1e12, bandwidth=0)


def test_measured_rates_of_this_machine() -> None:
    flops, bandwidth = measure_rates("cpu")
    assert flops > 1e8
    assert bandwidth > 1e8


def test_estimated_temporary_bytes_equal_measured_ones() -> None:
    """They are new gradients of the weight, of the output and of the input."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16))
    measured = profile(model, torch.ones(4, 8), repeats=1, progress=False).at(4)
    estimated = estimate(model, torch.ones(4, 8), flops=1e9, bandwidth=1e9).at(4)
    first, second = (layer.momentary for layer in measured.layers)
    assert [layer.momentary for layer in estimated.layers] == [first, second]
    weight, bias, output, inputs = 4 * 32 * 16, 4 * 16, 4 * 4 * 16, 4 * 4 * 32
    assert weight + output <= second <= weight + bias + output + inputs
    assert first < 4 * 32 * 8 + 4 * 32 + 4 * 4 * 32 + 4 * 4 * 8


def test_the_old_name_of_example_inputs_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"'sample' of estimate\(\).* 'example_inputs'"):
        found = estimate([linear()], sample=torch.ones(2, WIDTH), flops=1e12, bandwidth=1e11)  # type: ignore[call-arg]  # the old name
    assert found == estimate([linear()], torch.ones(2, WIDTH), flops=1e12, bandwidth=1e11)
