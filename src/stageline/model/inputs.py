"""What the loader brings, by the names under which layers read it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stageline.errors import BatchError
from stageline.model.layers import CHAIN, INPUT, LayerSequence

NONE_MORE: Mapping[str, Any] = MappingProxyType({})


def named_inputs(
    layers: LayerSequence, inputs: Any, named: Mapping[str, Any] = NONE_MORE
) -> dict[str, Any]:
    """Those of a dict, or the one that the first layer reads, and further ones by name.

    >>> from torch import nn
    >>> named_inputs(LayerSequence.of([nn.ReLU()]), [1.0, 2.0])
    {'x': [1.0, 2.0]}
    """
    names = {v.name for row in layers.sources for v in row if v.writer == INPUT}
    is_named = isinstance(inputs, dict) and names - named.keys() != {CHAIN}
    found = {**(inputs if is_named else {CHAIN: inputs}), **named}
    if unknown := sorted(named.keys() - names):
        raise BatchError(
            f"inputs are given by the names {', '.join(unknown)}, but layers read "
            f"{', '.join(sorted(names))}: name them in a layer's reads, or leave them away"
        )
    if missing := sorted(names - found.keys()):
        raise BatchError(
            f"inputs have {', '.join(map(str, found))}, but layers read {', '.join(missing)} "
            "before any layer writes it: give inputs as a dict with these names"
        )
    return {name: found[name] for name in names}
