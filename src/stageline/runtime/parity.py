"""The plain loop that a pipeline is held to, one micro-batch after another, and the comparison.

The loop follows the same rules for randomness, BatchNorm and tied weights, and shares nothing else
with the pipeline: no stages, no messages, no halves, no recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime import trees
from stageline.runtime.batch_norm import Statistics
from stageline.runtime.executor import Step
from stageline.runtime.inner import Inner
from stageline.runtime.randomness import Key, drawing
from stageline.runtime.split_backward import CatchWeights, add_weight_gradients
from stageline.runtime.stage import LOSS, LOSS_NUMBER
from stageline.runtime.tied import TiedWeights


def plain_step(
    layers: LayerSequence,
    step: Step,
    batch_norm: str,
    accumulate: str = "exact",
    is_caught: Callable[[int], bool] = lambda _: True,
) -> None:
    """Forward and backward of all micro-batches, in ascending order.

    `is_caught` tells of the number of a layer whether gradients may be added inside of products.
    """
    is_fused = accumulate == "fused"
    direct = {n for n in (LOSS_NUMBER, *range(len(layers))) if not is_caught(n)}
    tied = TiedWeights.of(layers).without_hooked()
    statistics = Statistics.of((layer.module for layer in layers.layers), batch_norm)
    for microbatch, target in enumerate(step.targets):
        catch = CatchWeights(Inner.given(direct)) if is_fused else None
        with ExitStack() as around:
            step.ambient.enter(around, grad=True)
            around.enter_context(statistics.watch(step.number, microbatch, again=False))
            if catch:
                around.enter_context(catch)
            output = _output(layers, step, microbatch, tied, catch)
            with drawing(Key(step.seed, step.number, step.first + microbatch, LOSS)):
                loss = target.loss(output)
        loss.backward(torch.full_like(loss, target.weight))  # type: ignore[no-untyped-call]
        if catch:
            add_weight_gradients(catch.calls, fused=True)
        step.losses[microbatch] = loss.detach()
    tied.add_gradients()
    statistics.update(step.number, lambda seen: seen)


def _output(
    layers: LayerSequence,
    step: Step,
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
        with drawing(Key(step.seed, step.number, step.first + microbatch, layer.name)):
            result = functional_call(layer.module, tied.by_layer.get(number, {}), tuple(read))
        results = layer.written(result)
        values |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}
    if catch:
        catch.layer = LOSS_NUMBER
    return values[layers.output]


@contextmanager
def left_as_it_was(layers: LayerSequence) -> Iterator[None]:
    """Gradients set aside and buffers put back."""
    modules = layers.modules
    gradients = [(parameter, parameter.grad) for parameter in modules.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer, before in buffers:
            buffer.copy_(before)
            setattr(module, name, buffer)


def detached(batch: Any) -> Any:
    """A copy of a batch, at the edge of a graph of its own."""
    return trees.map_leaves(lambda item: trees.at_the_edge(trees.copied(item)), batch)


def compare(
    layers: LayerSequence,
    plain: LayerSequence,
    losses: Mapping[int, Tensor],
    plain_losses: Mapping[int, Tensor],
    cut: Sequence[range],
) -> str | None:
    """The first gradient, buffer or loss that is not the same to the bit, in words."""
    pairs = ((stage, number) for stage, numbers in enumerate(cut) for number in numbers)
    for stage, number in pairs:
        layer, other = layers.layers[number], plain.layers[number]
        wanted = {name: p.grad for name, p in other.module.named_parameters()}
        wanted |= dict(other.module.named_buffers())
        found = {name: p.grad for name, p in layer.module.named_parameters()}
        found |= dict(layer.module.named_buffers())
        for name, tensor in found.items():
            if difference := _difference(f"{layer.name}.{name}", tensor, wanted[name], stage):
                return difference
    for microbatch, loss in losses.items():
        plain_loss = plain_losses[microbatch]
        name = f"the loss of micro-batch {microbatch}"
        if difference := _difference(name, loss, plain_loss, len(cut) - 1):
            return difference
    return None


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
