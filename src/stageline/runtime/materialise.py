"""Models built on the meta device: a process makes only the weights that its own stages use.

So a model may be larger than any one process. Weights that are drawn depend on the seed and the
layer's name alone, so they are the same however the model is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime.randomness import layer_seed

Init = Callable[[Layer], object]


def materialise(
    layers: LayerSequence,
    here: Iterable[int],
    devices: Callable[[int], torch.device | None],
    seed: int,
    init: Init | None,
) -> None:
    """Give the layers that are here weights and buffers, if they have none yet."""
    made: dict[Tensor, Tensor] = {}
    fresh = []
    for number in here:
        layer = layers.layers[number]
        tensors = [t for t in tensors_of(layer.module) if t.is_meta and t not in made]
        for tensor in tensors:
            empty = torch.empty_like(tensor, device=devices(number) or "cpu")
            made[tensor] = parameter_or_buffer(tensor, empty)
        if tensors:
            fresh.append(layer)
    for layer in layers:  # also elsewhere: a weight that two layers share stays one weight
        replace(layer.module, made)
    for layer in fresh:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(layer_seed(seed, 0, 0, layer.name))
            (init or reset)(layer)


def reset(layer: Layer) -> None:
    """As its modules do it themselves."""
    for name, module in layer.module.named_modules():
        if any(True for _ in _own(module)):
            again: Any = getattr(module, "reset_parameters", None)
            if again is None:
                where = f"{layer.name}.{name}" if name else layer.name
                raise ModelError(
                    f"{where!r}, a {type(module).__name__}, is on the meta device and has no "
                    "reset_parameters(): give Pipeline an init=, a function that fills a layer"
                )
            again()


def parameter_or_buffer(tensor: Tensor, empty: Tensor) -> Tensor:
    """Another tensor as what the first one is."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty


def replace(module: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Tensors of a module by others, wherever it has them."""
    for part in module.modules():
        for places in (part._parameters, part._buffers):  # noqa: SLF001  as nn.Module.to does
            for name, tensor in places.items():
                if tensor is not None and tensor in made:
                    places[name] = made[tensor]  # type: ignore[assignment]


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _own(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
