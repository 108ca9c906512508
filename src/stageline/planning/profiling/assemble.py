"""A measurement, put together from the times and bytes of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from stageline.model.layers import Layer, Value
from stageline.planning.profiling.activations import Bytes, Kept
from stageline.planning.profiling.profile import LayerCost, Measurement, Tied, ValueCost
from stageline.planning.profiling.solo import Solo
from stageline.runtime import trees


class Times(NamedTuple):
    """Of one layer, in seconds, as `LayerCost` has them."""

    forward: float
    input_grad: float
    weight_grad: float
    halving: float = 0.0
    spread: float = 0.0


def measurement(samples: int, solo: Solo, times: Sequence[Times], kept: Bytes) -> Measurement:
    """Of layers that have put down what they write."""
    layers = map(_layer_cost, solo.layers, times, kept.layers)
    return Measurement(samples, tuple(layers), _value_costs(solo, kept))


def tied_weights(solo: Solo) -> tuple[Tied, ...]:
    return tuple(
        Tied(tuple(number for number, _ in doubles), _num_bytes([weight]))
        for weight, doubles in solo.tied.by_weight
    )


def _layer_cost(layer: Layer, times: Times, kept: Kept) -> LayerCost:
    return LayerCost(
        forward=times.forward,
        input_grad=times.input_grad,
        weight_grad=times.weight_grad,
        activation=kept.activation,
        retained=kept.retained,
        parameters=_num_bytes(layer.module.parameters()),
        buffers=_num_bytes(layer.module.buffers()),
        waiting=kept.waiting,
        halving=times.halving,
        spread=times.spread,
        momentary=kept.momentary,
    )


def _value_costs(solo: Solo, kept: Bytes) -> tuple[ValueCost, ...]:
    """Of all that passes between layers, also what is no tensor and takes no bytes."""
    readers: dict[Value, list[int]] = {}
    for number, sources in enumerate(solo.layers.sources):
        for value in dict.fromkeys(sources):
            readers.setdefault(value, []).append(number)
    return tuple(
        ValueCost(
            value.writer,
            tuple(numbers),
            _num_bytes(trees.tensors(solo.values[value])),
            kept.unsaved[value],
            tuple(
                number
                for number in (value.writer, *numbers)
                if number >= 0 and value not in kept.needed[number]
            ),
        )
        for value, numbers in readers.items()
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """As they would be sent or saved, each on its own."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
