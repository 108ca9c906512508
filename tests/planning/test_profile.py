"""`sl.profile`: sizes, times, the model left unchanged, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from time import sleep
from typing import Any

import pytest
import torch
from tests.planning.small_layers import (
    SAMPLES,
    TENSOR,
    WIDTH,
    linear,
    memory_of_layers,
    profile_one_size,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

from stageline.errors import BatchError, PlanError, StageError
from stageline.model.layers import INPUT, Layer
from stageline.planning.profiling.profile import profile
from stageline.zoo.cases import make_case
from stageline.zoo.emulated import Occupy


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_default_sizes_are_a_quarter_a_half_and_all_of_the_example() -> None:
    found = profile([linear()], torch.randn(8, WIDTH), repeats=1)
    assert [each.samples for each in found.measurements] == [2, 4, 8]
    found = profile([linear()], torch.randn(2, WIDTH), sizes=(5, 1), repeats=1)
    assert [each.samples for each in found.measurements] == [1, 5]
    assert [each.values[0].size for each in found.measurements] == [WIDTH * 4, 5 * WIDTH * 4]


def test_named_inputs_and_values_that_are_not_tensors() -> None:
    case = make_case("branches")
    inputs, target = case.batches[0]
    found = profile_one_size(case.layers, inputs, loss_fn=case.loss_fn, target=target)
    sizes = {(value.writer, len(value.readers)): value.size for value in found.values}
    assert sizes[0, 3] == 0  # the length, which the first layer writes as a number
    assert sizes[INPUT, 3] == 0  # the scale
    assert max(value.size for value in found.values) == SAMPLES * 5 * 6 * 4


class AddPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_inputs_in_a_tuple() -> None:
    pair = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    found = profile_one_size([AddPair(), linear()], pair)
    assert found.values[0].size == 2 * TENSOR


def test_a_slower_layer_is_measured_as_slower() -> None:
    slow, fast = Occupy(0.02, 0.02, 0.02), Occupy(0.002, 0.002, 0.002)
    found = profile([fast, slow], torch.ones(2, 1), sizes=[2], repeats=3).measurements[0].layers
    for time in ("forward", "input_grad", "weight_grad"):
        assert getattr(found[1], time) > getattr(found[0], time)


class Irregular(nn.Module):
    """In every other round it takes 40 ms longer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        sleep(0.04 * (self.calls // 2 % 2))
        return x


def test_the_spread_of_a_layer_whose_times_vary() -> None:
    found = profile([nn.Identity(), Irregular()], torch.ones(2, 1), sizes=[2], repeats=8)
    steady, irregular = found.measurements[0].layers
    assert irregular.spread > 0.01
    assert irregular.spread > steady.spread
    assert "is something else running?" in str(found)


def test_a_single_round_has_no_spread() -> None:
    assert profile_one_size([linear()]).layers[0].spread == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_concurrent_ranks_measure_the_same_bytes(ranks: int) -> None:
    case = make_case("gpt")
    inputs, target = case.batches[0]
    options: dict[str, Any] = {"loss_fn": case.loss_fn, "target": target}
    alone = profile_one_size(case.layers, inputs, **options)
    together = profile_one_size(case.layers, inputs, ranks=ranks, **options)
    assert memory_of_layers(alone) == memory_of_layers(together)
    assert all(layer.forward > 0 for layer in together.layers)


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, tensor.clone(), id(tensor), tensor.requires_grad) for name, tensor in tensors],
        [None if p.grad is None else (p.grad.clone(), id(p.grad)) for p in model.parameters()],
        [part.training for part in model.modules()],
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_is_left_unchanged(ranks: int) -> None:
    norm, frozen = nn.BatchNorm1d(WIDTH), linear().requires_grad_(False)
    model = nn.Sequential(linear(), norm, nn.Dropout(0.5), frozen, nn.Dropout(0.1).eval(), linear())
    model(torch.randn(SAMPLES, WIDTH)).sum().backward()
    model[5].zero_grad()
    base = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    sample, target = base * 2, torch.randn(SAMPLES, WIDTH)
    before = state(model)
    profile(model, sample, loss_fn=mse_loss, target=target, sizes=[2, 6], repeats=1, ranks=ranks)
    compared = zip(pytree.tree_leaves(before), pytree.tree_leaves(state(model)), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in compared)
    assert base.grad is None
    (gradient,) = torch.autograd.grad(sample.sum(), base)
    assert torch.equal(gradient, torch.full_like(base, 2.0))


def test_nothing_is_printed_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    profile([Occupy(0.03, 0.0, 0.0)], torch.ones(4, 1), repeats=1)  # more than a second
    assert capfd.readouterr() == ("", "")


def test_a_model_on_the_meta_device_is_refused_with_a_hint_to_estimate() -> None:
    with torch.device("meta"):
        model = nn.Sequential(linear(), nn.ReLU())
    with pytest.raises(PlanError, match=r"layer '0' is on the meta device, .* estimate\(\)"):
        profile(model, torch.randn(SAMPLES, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [0]}, r"sizes is \[0\], but has to be a list of numbers of samples"),
        ({"sizes": []}, r"sizes is \[\]"),
        ({"sizes": [2.5]}, r"sizes is \[2.5\]"),
        ({"repeats": 0}, "repeats is 0, but has to be a whole number from 1 up"),
        ({"ranks": True}, "ranks is True"),
        ({"target": torch.ones(SAMPLES)}, "target is given without a loss_fn"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        profile([linear()], torch.randn(SAMPLES, WIDTH), **options)


def test_example_inputs_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(BatchError, match="layers read skip before any layer writes it"):
        profile([Layer("a", linear(), reads=("skip",))], torch.randn(SAMPLES, WIDTH))
    with pytest.raises(StageError, match=r"layer '1' failed on inputs of shapes \(4, 8\)"):
        profile_one_size([linear(), nn.Linear(3, 3)])


def test_the_old_name_of_example_inputs_works_with_a_warning() -> None:
    example = torch.randn(SAMPLES, WIDTH)
    with pytest.warns(DeprecationWarning, match=r"'sample' of profile\(\).* 'example_inputs'"):
        old = profile([linear()], sample=example, repeats=1)  # type: ignore[call-arg]  # the old name
    assert old.at(SAMPLES).values == profile([linear()], example, repeats=1).at(SAMPLES).values
    with pytest.raises(TypeError, match="'sample' and 'example_inputs', its new name"):
        profile([linear()], sample=example, example_inputs=example)  # type: ignore[call-arg]  # both
