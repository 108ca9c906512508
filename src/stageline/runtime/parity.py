"""The plain loop that a pipeline is held to, one micro-batch after another, and the comparison.

The loop follows the same rules for randomness, BatchNorm and tied weights, and shares nothing else
with the pipeline: no stages, no messages, no halves, no recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from stageline.errors import ParityError
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime.batch_norm import Statistics
from stageline.runtime.executor import Step
from stageline.runtime.randomness import drawing, layer_seed
from stageline.runtime.stage import LOSS
from stageline.runtime.tied import TiedWeights


def plain_step(layers: LayerSequence, step: Step, batch_norm: str) -> None:
    """Forward and backward of all micro-batches, in ascending order."""
    tied = TiedWeights.of(layers)
    statistics = Statistics.of((layer.module for layer in layers.layers), batch_norm)
    for microbatch, target in enumerate(step.targets):
        with step.ambient.again(grad=True), statistics.watch(microbatch, again=False):
            output = _output(layers, step, microbatch, tied)
            with drawing(layer_seed(step.seed, step.number, microbatch, LOSS)):
                loss = target.loss(output)
        loss.backward(torch.full_like(loss, target.weight))  # type: ignore[no-untyped-call]
    tied.add_gradients()
    statistics.update()


def _output(layers: LayerSequence, step: Step, microbatch: int, tied: TiedWeights) -> Any:
    values: dict[Value, Any] = {}
    for number, layer in enumerate(layers.layers):
        read = (
            step.inputs[microbatch][value.name] if value.writer == INPUT else values[value]
            for value in layers.sources[number]
        )
        with drawing(layer_seed(step.seed, step.number, microbatch, layer.name)):
            result = functional_call(layer.module, tied.by_layer.get(number, {}), tuple(read))
        results = result if len(layer.writes) > 1 else (result,)
        values |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}
    return values[layers.output]


@contextmanager
def left_as_it_was(layers: LayerSequence) -> Iterator[None]:
    """Gradients set aside and buffers put back."""
    modules = nn.ModuleList(layer.module for layer in layers.layers)
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


def compare(layers: LayerSequence, plain: LayerSequence) -> None:
    """Raise for the first gradient or buffer that is not the same to the bit."""
    for layer, other in zip(layers.layers, plain.layers, strict=True):
        wanted = {name: p.grad for name, p in other.module.named_parameters()}
        wanted |= dict(other.module.named_buffers())
        found = {name: p.grad for name, p in layer.module.named_parameters()}
        found |= dict(layer.module.named_buffers())
        for name, tensor in found.items():
            _compare(f"{layer.name}.{name}", tensor, wanted[name])


def _compare(name: str, found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    if found is None or wanted is None:
        if (found is None) != (wanted is None):
            whose = "the plain loop" if found is None else "the pipeline"
            raise ParityError(f"{name} has a gradient in {whose} only")
    elif not torch.equal(found, wanted):
        apart = float((found.double() - wanted.double()).abs().max())
        raise ParityError(
            f"{name} differs from a plain loop by {apart:.3g} at most, but should not in any bit: "
            "does a layer keep state between calls, or draw from a generator of its own?"
        )
