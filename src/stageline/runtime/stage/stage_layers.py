"""The layers of one stage: the values that each reads and writes, and when a value is released."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from stageline.model.layers import Layer, LayerSequence, Value
from stageline.runtime.exactness.tied_weights import TiedWeights


class StageLayer(NamedTuple):
    """A layer in its stage: everything that is known before any data arrives."""

    number: int
    name: str
    module: nn.Module
    layer: Layer
    sources: tuple[Value, ...]
    writes: tuple[Value, ...]
    last_uses: tuple[Value, ...]  # values of this stage that nothing reads after this layer
    aliases: dict[str, Tensor] | None  # of weights that other layers use as well


def layers_of_stage(
    layers: LayerSequence, stage: range, tied: TiedWeights, kept: set[Value]
) -> list[StageLayer]:
    """Return the layers of a stage; `kept` are values that outlive their last use in it."""
    last_uses = _last_uses(layers, stage, kept)
    return [
        StageLayer(
            number,
            layers.layers[number].name,
            layers.layers[number].module,
            layers.layers[number],
            layers.sources[number],
            tuple(Value(number, name) for name in layers.layers[number].writes),
            last_uses[number],
            tied.by_layer.get(number),
        )
        for number in stage
    ]


def reads_of(layers: LayerSequence, stage: range) -> tuple[Value, ...]:
    """Return the values that a stage reads from the loader or from other stages."""
    read = (value for number in stage for value in layers.sources[number])
    return tuple(dict.fromkeys(value for value in read if value.writer not in stage))


def other_readers(layers: LayerSequence, stage: range) -> dict[Value, list[int]]:
    """Return for each value that a stage reads the layers of other stages that read it as well."""
    found: dict[Value, list[int]] = {value: [] for value in reads_of(layers, stage)}
    for number, sources in enumerate(layers.sources):
        if number not in stage:
            for value in sources:
                if value in found:
                    found[value].append(number)
    return found


def _last_uses(
    layers: LayerSequence, stage: range, kept: set[Value]
) -> dict[int, tuple[Value, ...]]:
    """Return by layer the values of this stage that nothing reads after it."""
    last: dict[Value, int] = {}
    for number in stage:
        last |= {value: number for value in layers.sources[number] if value.writer in stage}
        last |= {Value(number, name): number for name in layers.layers[number].writes}
    by_layer: dict[int, list[Value]] = {number: [] for number in stage}
    for value, number in last.items():
        if value not in kept:
            by_layer[number].append(value)
    return {number: tuple(values) for number, values in by_layer.items()}
