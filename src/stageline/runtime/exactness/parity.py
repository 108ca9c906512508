"""The plain loop that a pipeline is held to, one micro-batch after another, and the comparison.

The loop follows the same rules for randomness, BatchNorm and tied weights, and shares nothing else
with the pipeline: no stages, no messages, no halves, no recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stageline.errors import StageError
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime import trees
from stageline.runtime.engine import autograd as engine
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.engine.split_backward import CatchWeights, add_weight_gradients
from stageline.runtime.engine.stage import LOSS, LOSS_NUMBER
from stageline.runtime.exactness.batch_norm import Statistics
from stageline.runtime.exactness.inner_gradients import Inner
from stageline.runtime.exactness.layer_state import LayerState
from stageline.runtime.exactness.randomness import Key, drawing
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.exactness.weight_aliases import kept


def plain_step(
    layers: LayerSequence,
    step: MiniBatch,
    batch_norm: str,
    accumulate: str = "exact",
    is_caught: Callable[[int], bool] = lambda _: True,
    outside: dict[Tensor, Tensor | None] | None = None,
) -> None:
    """Run forward and backward of all micro-batches, in ascending order.

    `is_caught` tells of the number of a layer whether gradients may be added inside of products.
    `outside` is filled with tensors in no layer that get gradients, and those that they had before.
    """
    outside = {} if outside is None else outside
    is_fused = accumulate == "fused"
    direct = {n for n in (LOSS_NUMBER, *range(len(layers))) if not is_caught(n)}
    tied = TiedWeights.of(layers).without_hooked()
    statistics = Statistics.of((layer.module for layer in layers.layers), batch_norm)
    inputs = (tensor for part in step.inputs for tensor in trees.tensors(part))
    own = {id(tensor) for tensor in (*tied.weights(layers), *map(_base, inputs))}
    for microbatch, target in enumerate(step.targets):
        catch = CatchWeights(Inner.given(direct)) if is_fused else None
        with ExitStack() as around:
            step.ambient.enter(around, grad=True)
            around.enter_context(statistics.watch(step.number, microbatch, again=False))
            if catch:
                around.enter_context(catch)
            output = _output(layers, step, microbatch, tied, catch)
            with (
                _named(LOSS, microbatch),
                drawing(Key(step.seed, step.number, step.first + microbatch, LOSS)),
            ):
                loss = target.loss(output)
        for leaf in engine.leaves([loss]):
            if id(leaf) not in own and leaf not in outside:
                outside[leaf], leaf.grad = leaf.grad, None
        with _named("the backward", microbatch):
            loss.backward(torch.full_like(loss, target.weight))  # type: ignore[no-untyped-call]
        if catch:
            add_weight_gradients(catch.calls, fused=True)
        step.losses[microbatch] = loss.detach()
    tied.add_gradients()
    statistics.update(step.number, lambda seen: seen)


def _output(
    layers: LayerSequence,
    step: MiniBatch,
    microbatch: int,
    tied: TiedWeights,
    catch: CatchWeights | None,
) -> Any:
    values: dict[Value, Any] = {}
    for number, layer in enumerate(layers.layers):
        if catch:
            catch.layer = number
        read = (
            step.inputs[microbatch][value.name] if value.writer == INPUT else values[value]
            for value in layers.sources[number]
        )
        with (
            _named(f"layer {layer.name!r}", microbatch),
            drawing(Key(step.seed, step.number, step.first + microbatch, layer.name)),
        ):
            result = functional_call(layer.module, tied.by_layer.get(number, {}), tuple(read))
        results = layer.written(result)
        values |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}
    if catch:
        catch.layer = LOSS_NUMBER
    return values[layers.output]


@contextmanager
def _named(what: str, microbatch: int) -> Iterator[None]:
    """Say where something went wrong."""
    try:
        yield
    except Exception as error:
        raise StageError(
            f"{what} failed in the plain loop that verify compares with, at micro-batch "
            f"{microbatch}\n  {type(error).__name__}: {error}"
        ) from error


def _base(tensor: Tensor) -> Tensor:
    """Return the tensor that a micro-batch is a part of."""
    return tensor if tensor._base is None else tensor._base  # noqa: SLF001  there is no public name


@contextmanager
def left_as_it_was(layers: LayerSequence, loss_fn: object = None) -> Iterator[None]:
    """Set gradients aside, let forwards move copies of the layers' state, and put all back."""
    modules = [*layers.modules, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    weights = list(nn.ModuleList(modules).parameters())
    gradients = [(weight, weight.grad) for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        with kept(weights), LayerState(modules).untouched():
            yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient


@contextmanager
def without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Set the gradients of tensors that are in no layer aside."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def detached(batch: Any) -> Any:
    """A copy of a batch, at the edge of a graph of its own."""
    return trees.map_leaves(lambda item: trees.at_the_edge(trees.copied(item)), batch)


@dataclass(frozen=True)
class Outcome:
    """What a step left behind: the losses, and by layer and name gradients and buffers."""

    losses: Mapping[int, Tensor]
    tensors: Mapping[tuple[int, str], Tensor | None]
    outside: Mapping[Tensor, Tensor | None]  # gradients of tensors that are in no layer

    @staticmethod
    def of(layers: LayerSequence, step: MiniBatch, outside: Iterable[Tensor]) -> Outcome:
        tensors: dict[tuple[int, str], Tensor | None] = {}
        for number, layer in enumerate(layers.layers):
            for name, weight in layer.module.named_parameters():
                tensors[number, name] = weight.grad
            for name, buffer in layer.module.named_buffers():
                tensors[number, name] = buffer
        return Outcome(dict(step.losses), tensors, {leaf: leaf.grad for leaf in outside})


def compare(
    layers: LayerSequence, found: Outcome, wanted: Outcome, cut: Sequence[range]
) -> str | None:
    """Return the first gradient, buffer or loss that is not the same to the bit, in words."""
    for stage, numbers in enumerate(cut):
        for number in numbers:
            names = [name for at, name in found.tensors if at == number]
            for name in names:
                whose = f"{layers.layers[number].name}.{name}"
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
    found: Outcome, wanted: Outcome
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield gradients of weights that are in no layer.

    A forward may make leaves of its own, which are others each time; only parameters count.
    """
    for leaf, gradient in found.outside.items():
        if isinstance(leaf, nn.Parameter):
            name = f"a weight of shape {tuple(leaf.shape)} that is in no layer, but in the loss"
            yield name, gradient, wanted.outside[leaf]


def _difference(name: str, found: Tensor | None, wanted: Tensor | None, stage: int) -> str | None:
    if found is None or wanted is None:
        whose = "the plain loop" if found is None else "the pipeline"
        is_one = (found is None) != (wanted is None)
        return f"{name} (stage {stage}) has a gradient in {whose} only" if is_one else None
    if _are_same(found, wanted):
        return None
    apart = float((found.double() - wanted.double()).abs().max())
    return (
        f"{name} (stage {stage}) differs from a plain loop by {apart:.3g} at most, but should not "
        "in any bit: does a layer keep state between calls, draw from a generator of its own, or "
        "use a value more than once that other layers read too?"
    )


def _are_same(a: Tensor, b: Tensor) -> bool:
    """To the bit; what is not a number is the same as itself."""
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    b = b.to(a.device)
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
