"""Count the FLOPs of layers from shapes alone, on the meta device, which computes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from stageline.model.device_settings import preserved_generators
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.model.named_places import named_places
from stageline.model.recording.preserved import preserved_attributes, preserved_foreign_random
from stageline.torch_private import pytree


def forward_flops(layers: LayerSequence, inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the forward FLOPs of each layer, or None if a layer cannot run without data."""
    values = {Value(INPUT, name): _meta(value) for name, value in inputs.items()}
    counts = []
    for number, layer in enumerate(layers.layers):
        try:
            result, flops = _run(layer, [values[value] for value in layers.sources[number]])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # its shapes depend on data, or it creates tensors on a device of its own
        results = layer.written(result)
        values |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}
        counts.append(flops)
    return counts


def _run(layer: Layer, given: list[Any]) -> tuple[Any, int]:
    tensors = _meta(dict(named_places(layer.module)))
    modules = layer.module.modules()
    with (
        warnings.catch_warnings(action="ignore"),  # of gradients that a checkpoint misses
        torch.no_grad(),
        preserved_generators(),  # what is made without a device is not on meta
        preserved_attributes(modules),
        preserved_foreign_random(),
        FlopCounterMode(display=False) as counter,
    ):
        result = functional_call(layer.module, tensors, tuple(given), tie_weights=False)
    return result, counter.get_total_flops()


def _meta(tree: Any) -> Any:
    return pytree.tree_map(
        lambda item: item.detach().to("meta") if isinstance(item, torch.Tensor) else item, tree
    )
