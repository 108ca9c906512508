"""Match the inputs of a batch with the names under which layers read them.

A mapping has a value for each name that layers read. If they read only `x`, a mapping without `x`
is itself the value of `x`, for a layer that takes its batch as a whole. Anything that is not a
mapping is the value of `x`. Names that no layer reads are an error, as an unknown argument is in a
plain call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from stageline.errors import BatchError
from stageline.model.layers import CHAIN, INPUT, LayerSequence

NO_NAMED: Mapping[str, Any] = MappingProxyType({})


def batch_inputs(
    layers: LayerSequence, inputs: Any, named: Mapping[str, Any] = NO_NAMED
) -> dict[str, Any]:
    """Return the inputs of a batch in the form in which it is cut into micro-batches."""
    if layers.recording is not None:
        return {"inputs": inputs, "named": dict(named)}
    return named_inputs(layers, inputs, named)


def microbatch_inputs(layers: LayerSequence, part: dict[str, Any]) -> dict[str, Any]:
    """Return what layers read of a micro-batch, by name."""
    return part if layers.recording is None else layers.recording.prepare(**part)


def named_inputs(
    layers: LayerSequence, inputs: Any, named: Mapping[str, Any] = NO_NAMED
) -> dict[str, Any]:
    """Return a value for each name that layers read, in the order in which they first read it.

    The order is the same in every process; that of a set would depend on hashes.

    >>> from torch import nn
    >>> named_inputs(LayerSequence.of([nn.ReLU()]), [1.0, 2.0])
    {'x': [1.0, 2.0]}
    >>> named_inputs(LayerSequence.of([nn.ReLU()]), {"x": 1.0})
    {'x': 1.0}
    """
    names = list(dict.fromkeys(v.name for row in layers.sources for v in row if v.writer == INPUT))
    open_names = [name for name in names if name not in named]
    found = _by_name(inputs, open_names)
    if both := [name for name in found if name in named]:
        raise BatchError(
            f"{_listed(both)} is given both in the inputs and by name: give it once, and use "
            "None as inputs if all are given by name"
        )
    found |= named
    if missing := [name for name in names if name not in found]:
        raise BatchError(
            f"inputs have {_listed(found) or 'nothing'}, but layers read {_listed(missing)} "
            "before any layer writes it: give inputs as a dict with these names"
        )
    if unknown := [name for name in found if name not in names]:
        raise BatchError(
            f"inputs have {_listed(unknown)}, but layers read only {_listed(names) or 'nothing'}: "
            "add it to a layer's reads, or remove it from the batch (to pass a whole mapping as "
            "the value of x, use {'x': mapping})"
        )
    return {name: found[name] for name in names}


def _by_name(inputs: Any, names: list[str]) -> dict[Any, Any]:
    """Return the positional inputs by name; None means no inputs if no layer reads `x`."""
    if isinstance(inputs, Mapping) and (names != [CHAIN] or CHAIN in inputs):
        return {key: inputs[key] for key in inputs}
    if inputs is None and CHAIN not in names:
        return {}
    return {CHAIN: inputs}


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
