"""The memory that profiles attribute to layers, by hand and against the runtime."""

from __future__ import annotations

import weakref
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
    tied_embedding,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.model.inputs import named_inputs
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import (
    TiedParameter,
    ValueCost,
)
from stageline.planning.profiling.resize_batch import resize_batch
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.checks import edges_of
from stageline.runtime.stage.stage import Stage
from stageline.runtime.stage.stage_values import ForwardArgs, InFlight, Target
from stageline.zoo.cases import CASES, make_case


def test_the_input_of_a_linear_is_attributed_to_the_layer_that_wrote_it() -> None:
    """The first input is from the data loader, and no layer needs the last output."""
    found = profile_one_size([linear(), linear()])
    assert memory_of_layers(found) == [(TENSOR, TENSOR, TENSOR), (0, 0, TENSOR)]


def test_a_relu_and_the_next_linear_save_the_same_tensor() -> None:
    found = profile_one_size([linear(), nn.ReLU(), linear()])
    assert memory_of_layers(found) == [(0, 0, TENSOR), (TENSOR, TENSOR, 0), (0, 0, TENSOR)]
    assert [value.unsaved for value in found.values] == [0, TENSOR, 0]


def test_an_in_place_relu_and_the_next_linear_save_the_same_tensor() -> None:
    found = profile_one_size([linear(), nn.ReLU(inplace=True), linear()])
    assert memory_of_layers(found) == [(0, 0, TENSOR), (TENSOR, TENSOR, 0), (0, 0, TENSOR)]


def test_a_layer_norm_saves_its_input_and_two_numbers_per_sample_until_the_input_gradient() -> None:
    found = profile_one_size([linear(), nn.LayerNorm(WIDTH)])
    numbers = 2 * SAMPLES * 4
    assert memory_of_layers(found) == [(TENSOR, 0, TENSOR), (numbers, 0, 0)]


def test_dropout_saves_its_mask_until_the_input_gradient() -> None:
    found = profile_one_size([linear(), nn.Dropout(0.5)])
    assert memory_of_layers(found) == [(0, 0, TENSOR), (TENSOR, 0, 0)]


def test_frozen_layers_save_nothing() -> None:
    frozen = [linear().requires_grad_(False), linear().requires_grad_(False)]
    assert memory_of_layers(profile_one_size(frozen)) == [(0, 0, 0), (0, 0, 0)]


def test_a_view_is_not_counted_in_addition_to_its_storage() -> None:
    found = profile_one_size([linear(), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.Linear(4, 4)])
    assert [layer.activation for layer in found.layers] == [0, TENSOR, 0, 0]


class Product(nn.Module):
    """Multiplies its two inputs, and saves both."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x * skip


def with_skip() -> LayerSequence:
    return LayerSequence(
        (
            Layer("write", linear(), writes=("skip",)),
            Layer("first", linear(), reads=("skip",)),
            Layer("second", Product(), reads=("x", "skip")),
        )
    )


def test_a_skip_that_two_layers_save_is_counted_once() -> None:
    found = profile_one_size(with_skip())
    assert [layer.activation for layer in found.layers] == [TENSOR, TENSOR, 0]
    assert found.values == (
        ValueCost(INPUT, (0,), TENSOR),
        ValueCost(0, (1, 2), TENSOR, let_go=(0, 2)),
        ValueCost(1, (2,), TENSOR, let_go=(1, 2)),
    )


def test_a_tied_embedding_counts_in_both_layers_and_is_listed_as_tied() -> None:
    tokens = torch.randint(10, (SAMPLES, 3))
    found = profile(tied_embedding(), tokens, sizes=[SAMPLES], repeats=1)
    layers = found.measurements[0].layers
    assert [layer.parameters for layer in layers] == [10 * WIDTH * 4] * 2
    assert found.tied == (TiedParameter((0, 1), 10 * WIDTH * 4),)
    assert memory_of_layers(found.measurements[0]) == [
        (3 * TENSOR, 3 * TENSOR, 3 * TENSOR),
        (0, 0, SAMPLES * 3 * 10 * 4),
    ]


def test_parameters_and_buffers_of_a_layer() -> None:
    layer = profile_one_size([linear(), nn.BatchNorm1d(WIDTH)]).layers[1]
    assert (layer.parameters, layer.buffers) == (2 * WIDTH * 4, 2 * WIDTH * 4 + 8)


def test_the_loss_is_part_of_the_last_layer() -> None:
    """Cross entropy saves a probability for each class, and the sum of its weights."""
    target = torch.randint(WIDTH, (SAMPLES,))
    with_loss = profile_one_size([linear()], loss_fn=cross_entropy, target=target)
    assert [layer.activation for layer in with_loss.layers] == [TENSOR + 4]
    assert [layer.activation for layer in profile_one_size([linear()]).layers] == [0]


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records the storages that operators create, as long as they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return result

    def num_bytes(self, *without: Tensor | None) -> int:
        apart = {t.untyped_storage()._cdata for t in without if t is not None}
        found = {key: reference() for key, reference in self.storages.items()}
        return sum(
            int(s.nbytes()) for key, s in found.items() if s is not None and key not in apart
        )


@pytest.mark.parametrize("name", CASES)
def test_a_stage_of_all_layers_holds_exactly_their_sum(name: str) -> None:
    case = make_case(name)
    inputs, target = case.batches[0]
    length = len(pytree.tree_leaves(target)[0])
    found = profile(
        case.layers, inputs, loss_fn=case.loss_fn, target=target, sizes=[length], repeats=1
    ).measurements[0]

    tied = TiedWeights.of(case.layers)
    stage = Stage(case.layers, range(len(case.layers)), (), tied, "minibatch")
    named = inputs if isinstance(inputs, dict) else {"x": inputs}
    values = {Value(INPUT, key): value for key, value in named.items()}
    context = ForwardContext.current()
    this = ForwardArgs(
        0, values, Target(case.loss_fn, target, 1.0), 0, 0, 0, context, in_halves=True
    )
    stage.forward(this, InFlight())  # a layer is watched at first
    stage.inner_gradients.stop_observing()
    stage.statistics.clear()
    waiting, alive = InFlight(), Alive()
    with alive:
        loss = stage.forward(this._replace(context=ForwardContext.current()), waiting).loss
        stage.statistics.clear()
        brought = [t for t in pytree.tree_leaves((inputs, target)) if isinstance(t, Tensor)]
        weights = list(case.layers.modules.parameters())
        there = [loss, *brought, *weights, *case.layers.modules.buffers()]
        assert alive.num_bytes(*there) == sum(layer.activation for layer in found.layers)
        stage.backward(0, {}, waiting, in_halves=True)
        there += [weight.grad for weight in weights]
        there += [double.grad for _, doubles in tied.by_weight for _, double in doubles]
    kept_until_w = sum(layer.retained + layer.waiting for layer in found.layers)
    assert alive.num_bytes(*there) == kept_until_w


@pytest.mark.parametrize("name", CASES)
def test_a_stage_holds_what_it_sends_even_if_no_layer_saves_it(name: str) -> None:
    """Every cut is tried, such as that of the ResNet between BatchNorm and an in-place ReLU."""
    case = make_case(name)
    inputs, _ = case.batches[0]
    found = profile_one_size(case.layers, inputs)
    for end in range(1, len(case.layers)):
        sent = [v for v in found.values if 0 <= v.writer < end <= max(v.readers)]
        expected = sum(layer.activation for layer in found.layers[:end])
        assert held_by_first(case.layers, end, inputs) == expected + sum(v.unsaved for v in sent)


def held_by_first(layers: LayerSequence, end: int, inputs: Any) -> int:
    """Return the bytes that a stage of the first layers holds between forward and backward."""
    _, (sent, _) = edges_of(layers, (range(end), range(end, len(layers))))
    stage = Stage(layers, range(end), sent, TiedWeights.of(layers), "minibatch")
    brought = resize_batch(named_inputs(layers, inputs), SAMPLES)
    values = {Value(INPUT, name): value for name, value in brought.items()}
    this = ForwardArgs(0, values, None, 0, 0, 0, ForwardContext.current())
    stage.forward(this, InFlight())
    waiting, alive = InFlight(), Alive()
    with alive:
        stage.forward(this, waiting)
        stage.statistics.clear()
    tensors = [t for t in pytree.tree_leaves(brought) if isinstance(t, Tensor)]
    return alive.num_bytes(*tensors, *layers.modules.parameters(), *layers.modules.buffers())
