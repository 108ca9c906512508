"""What the loader brings, by the names under which layers read it.

A mapping is named inputs: a value for each name that layers read. If they read `x` alone, a mapping
without an `x` is the value of `x` itself, for a layer that takes its batch as a whole; and whatever
is not a mapping is the value of `x` too. Names that no layer reads are refused, as a plain call
would refuse an argument that a function does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from stageline.errors import BatchError
from stageline.model.layers import CHAIN, INPUT, LayerSequence

NONE_MORE: Mapping[str, Any] = MappingProxyType({})


def named_inputs(
    layers: LayerSequence, inputs: Any, named: Mapping[str, Any] = NONE_MORE
) -> dict[str, Any]:
    """Return a value for each name that layers read, in the order in which they first read it.

    That order is the same in every process: what comes out of a set depends on its hashes.

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
            f"{_listed(both)} comes with the inputs and by its name as well: give it once, and "
            "None as inputs if all come by their names"
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
            "name it in a layer's reads, or take it out of the batch (a mapping that is to be the "
            "value of x as a whole goes in another: {'x': mapping})"
        )
    return {name: found[name] for name in names}


def _by_name(inputs: Any, names: list[str]) -> dict[Any, Any]:
    """Return what is given without a keyword; None is nothing if there is nothing to give."""
    if isinstance(inputs, Mapping) and (names != [CHAIN] or CHAIN in inputs):
        return {key: inputs[key] for key in inputs}
    if inputs is None and CHAIN not in names:
        return {}
    return {CHAIN: inputs}


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
