"""The plain loop that `pipe.verify` compares a pipeline with, and the comparison.

The loop runs one micro-batch after another. It follows the same rules for randomness, BatchNorm and
tied weights, and the weights are the same, so that they say in which type gradients are added. It
shares nothing else with the pipeline: no stages, no messages, no split backward, no recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stageline.errors import StageError
from stageline.model import trees
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.model.uncut import Uncut
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.exactness.batch_norm import RunningStatistics
from stageline.runtime.exactness.caller_context import outside_autocast
from stageline.runtime.exactness.gradient_types import EXACT, FUSED
from stageline.runtime.exactness.inner_gradients import InnerGradients
from stageline.runtime.exactness.layer_state import LayerState
from stageline.runtime.exactness.randomness.layer_randomness import LayerRandomness
from stageline.runtime.exactness.randomness.seeded_draws import RandomKey
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.exactness.weight_aliases import restored_after_hooks
from stageline.runtime.parity.unwrapped_model import run_unwrapped
from stageline.runtime.stage import autograd
from stageline.runtime.stage.forward_kind import ForwardKind, RunningForward
from stageline.runtime.stage.forward_pass import LOSS, LOSS_NUMBER
from stageline.runtime.stage.split_backward import add_weight_gradients
from stageline.runtime.stage.stage_values import Target
from stageline.runtime.stage.weight_calls import WeightCallInterceptor
from stageline.torch_private import view_base


def plain_step(
    layers: LayerSequence,
    step: MiniBatch,
    batch_norm: str,
    accumulate: str | torch.dtype = EXACT,
    is_intercepted: Callable[[int], bool] = lambda _: True,
    outside: dict[Tensor, Tensor | None] | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Run forward and backward of all micro-batches, in ascending order.

    A recorded model runs by its own forward, with `calls`: the inputs of each micro-batch.
    `is_intercepted` tells by the number of a layer whether gradients may be added inside of
    products. `outside` is filled with tensors in no layer that get gradients, and the gradients
    that they had before.
    """
    outside = {} if outside is None else outside
    direct = {n for n in (LOSS_NUMBER, *range(len(layers))) if not is_intercepted(n)}
    tied = TiedWeights.of(layers).without_hooked()
    statistics = RunningStatistics.of((layer.module for layer in layers.layers), batch_norm)
    inputs = (tensor for part in step.inputs for tensor in trees.tensors(part))
    own = {id(tensor) for tensor in (*tied.weights(layers), *map(view_base, inputs))}
    for microbatch, target in enumerate(step.targets):
        is_fused = accumulate == FUSED
        interceptor = WeightCallInterceptor(InnerGradients.fixed(direct)) if is_fused else None
        with ExitStack() as stack:
            step.ambient.enter(stack, grad=True)
            stack.enter_context(RunningForward(ForwardKind.ONLY))
            stack.enter_context(statistics.observe(step.number, microbatch, again=False))
            call = calls[microbatch] if calls else None
            loss = _forward(layers, step, microbatch, target, tied, interceptor, call)
        for leaf in autograd.leaves([loss]):
            if id(leaf) not in own and leaf not in outside:
                outside[leaf], leaf.grad = leaf.grad, None
        with _error_context("the backward", microbatch), outside_autocast():
            loss.backward(torch.full_like(loss, target.weight))  # type: ignore[no-untyped-call]
        if interceptor:
            add_weight_gradients(interceptor.calls, fused=True)
        step.losses[microbatch] = loss.detach()
    tied.add_gradients()
    statistics.update(step.number, lambda moments: moments)


def _forward(
    layers: LayerSequence,
    step: MiniBatch,
    microbatch: int,
    target: Target,
    tied: TiedWeights,
    interceptor: WeightCallInterceptor | None,
    call: Mapping[str, Any] | None,
) -> Tensor:
    """Return the loss of one micro-batch."""
    with interceptor or nullcontext():
        if call is None:
            output = _output(layers, step, microbatch, tied, interceptor)
        else:
            output = _unwrapped_output(layers, step, microbatch, tied, interceptor, call)
        with (
            _error_context(LOSS, microbatch),
            LayerRandomness(RandomKey(step.seed, step.number, step.first + microbatch, LOSS)),
        ):
            return target.loss(output)


def _output(
    layers: LayerSequence,
    step: MiniBatch,
    microbatch: int,
    tied: TiedWeights,
    interceptor: WeightCallInterceptor | None,
) -> Any:
    values: dict[Value, Any] = {}
    for number, layer in enumerate(layers.layers):
        if interceptor:
            interceptor.layer = number
        read = (
            step.inputs[microbatch][value.name] if value.writer == INPUT else values[value]
            for value in layers.sources[number]
        )
        key = RandomKey(step.seed, step.number, step.first + microbatch, layer.name)
        with _error_context(f"layer {layer.name!r}", microbatch), LayerRandomness(key):
            result = functional_call(
                layer.module, tied.by_layer.get(number, {}), tuple(read), tie_weights=False
            )
        results = layer.written(result)
        values |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}
    if interceptor:
        interceptor.layer = LOSS_NUMBER
    return values[layers.output]


def _unwrapped_output(
    layers: LayerSequence,
    step: MiniBatch,
    microbatch: int,
    tied: TiedWeights,
    interceptor: WeightCallInterceptor | None,
    call: Mapping[str, Any],
) -> Any:
    def enter(number: int) -> None:
        if interceptor:
            interceptor.layer = number

    def key(layer: str) -> RandomKey:
        return RandomKey(step.seed, step.number, step.first + microbatch, layer)

    with _error_context("the model", microbatch):
        output = run_unwrapped(layers, call, key, tied.by_layer, enter)
    enter(LOSS_NUMBER)
    return output


@contextmanager
def _error_context(what: str, microbatch: int) -> Iterator[None]:
    """Name what failed in the error."""
    try:
        yield
    except Exception as error:
        raise StageError(
            f"{what} failed in the plain loop that verify compares with, at micro-batch "
            f"{microbatch}\n  {type(error).__name__}: {error}"
        ) from error


@contextmanager
def preserved_model(layers: LayerSequence, loss_fn: object = None) -> Iterator[None]:
    """Let steps run without gradients and on copies of the layers' state, and restore both."""
    modules = [*layers.modules, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    weights = list(nn.ModuleList(modules).parameters())
    gradients = [(weight, weight.grad) for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        with restored_after_hooks(weights), LayerState(modules).preserved():
            yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient


@contextmanager
def without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Set `.grad` of these leaves to None, and restore it on leaving."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def detached_copy(batch: Any) -> Any:
    """Return a copy of a batch whose tensors are leaves of a new graph."""
    return trees.map_leaves(_detached_leaf, batch)


def _detached_leaf(item: Any) -> Any:
    if isinstance(item, Uncut):
        return Uncut(detached_copy(item.value))
    return trees.as_graph_leaf(trees.cloned(item))


@dataclass(frozen=True)
class StepOutcome:
    """The losses of a step, and gradients and buffers after it by layer and name."""

    losses: Mapping[int, Tensor]
    tensors: Mapping[tuple[int, str], Tensor | None]
    outside: Mapping[Tensor, Tensor | None]  # gradients of tensors that are in no layer

    @staticmethod
    def of(layers: LayerSequence, step: MiniBatch, outside: Iterable[Tensor]) -> StepOutcome:
        tensors: dict[tuple[int, str], Tensor | None] = {}
        for number, layer in enumerate(layers.layers):
            for name, weight in layer.module.named_parameters():
                tensors[number, name] = weight.grad
            for name, buffer in layer.module.named_buffers():
                tensors[number, name] = buffer
        return StepOutcome(dict(step.losses), tensors, {leaf: leaf.grad for leaf in outside})


def first_difference(
    layers: LayerSequence, found: StepOutcome, wanted: StepOutcome, cut: Sequence[range]
) -> str | None:
    """Describe the first gradient, buffer or loss that differs in any bit; None if none does."""
    for stage, numbers in enumerate(cut):
        for number in numbers:
            names = [name for at, name in found.tensors if at == number]
            for name in names:
                whose = layers.layers[number].full_name(name)
                pair = found.tensors[number, name], wanted.tensors.get((number, name))
                if difference := _difference(whose, *pair, stage):
                    return difference
    last = len(cut) - 1
    named = list(_outside_pairs(found, wanted)) if cut[last] else []
    for microbatch, loss in found.losses.items():
        named.append((f"the loss of micro-batch {microbatch}", loss, wanted.losses[microbatch]))
    differences = (_difference(name, tensor, other, last) for name, tensor, other in named)
    return next((difference for difference in differences if difference), None)


def _outside_pairs(
    found: StepOutcome, wanted: StepOutcome
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield gradients of weights that are in no layer.

    A forward may create leaves, which are new ones each time; only parameters count.
    """
    for leaf, gradient in found.outside.items():
        if isinstance(leaf, nn.Parameter):
            name = f"a weight of shape {tuple(leaf.shape)} that is in the loss and in no layer"
            yield name, gradient, wanted.outside[leaf]


def _difference(name: str, found: Tensor | None, wanted: Tensor | None, stage: int) -> str | None:
    if found is None or wanted is None:
        where = "the plain loop" if found is None else "the pipeline"
        is_one = (found is None) != (wanted is None)
        return f"{name} (stage {stage}) has a gradient in {where} only" if is_one else None
    if _are_same(found, wanted):
        return None
    largest = float((found.double() - wanted.double()).abs().max())
    return (
        f"{name} (stage {stage}) differs from a plain loop by up to {largest:.3g}, but should be "
        "equal in every bit: does a layer keep state between calls, draw from a generator of its "
        "own, or use a value more than once that other layers read too?"
    )


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in every bit; NaN is equal to NaN."""
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    b = b.to(a.device)
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
