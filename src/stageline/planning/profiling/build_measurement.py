"""Build a `Measurement` from the times and bytes of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from stageline.model import trees
from stageline.model.layers import Layer, Value
from stageline.planning.profiling.activation_memory import LayerBytes, ModelBytes
from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    TiedParameter,
    ValueCost,
)
from stageline.planning.profiling.trial.stage_overheads import NO_OVERHEADS, ActionOverheads


class LayerTimes(NamedTuple):
    """The times of one layer, in seconds; `LayerCost` describes the fields."""

    forward: float
    input_grad: float
    weight_grad: float
    halving: float = 0.0
    spread: float = 0.0
    halving_input: float = 0.0
    halving_weight: float = 0.0
    saved: float = 0.0


def build_measurement(
    num_samples: int,
    runner: LayerRunner,
    times: Sequence[LayerTimes],
    memory: ModelBytes,
    overheads: ActionOverheads = NO_OVERHEADS,
) -> Measurement:
    """Combine times and bytes; the runner must hold the values that its layers write."""
    layers = map(_layer_cost, runner.layers, times, memory.layers)
    return Measurement(num_samples, tuple(layers), _value_costs(runner, memory), overheads)


def tied_parameters(runner: LayerRunner) -> tuple[TiedParameter, ...]:
    """Return the parameters that several layers share."""
    return tuple(
        TiedParameter(tuple(number for number, _ in doubles), _num_bytes([weight]))
        for weight, doubles in runner.tied.by_weight
    )


def _layer_cost(layer: Layer, times: LayerTimes, memory: LayerBytes) -> LayerCost:
    return LayerCost(
        forward=times.forward,
        input_grad=times.input_grad,
        weight_grad=times.weight_grad,
        activation=memory.activation,
        retained=memory.retained,
        parameters=_num_bytes(layer.module.parameters()),
        buffers=_num_bytes(layer.module.buffers()),
        waiting=memory.waiting,
        halving=times.halving,
        spread=times.spread,
        momentary=memory.temporary,
        halving_input=times.halving_input,
        halving_weight=times.halving_weight,
        results=memory.results,
        time_saved=times.saved,
    )


def _value_costs(runner: LayerRunner, memory: ModelBytes) -> tuple[ValueCost, ...]:
    """Return the costs of all values between layers; those that are no tensors have no bytes."""
    readers: dict[Value, list[int]] = {}
    for number, sources in enumerate(runner.layers.sources):
        for value in dict.fromkeys(sources):
            readers.setdefault(value, []).append(number)
    return tuple(
        ValueCost(
            value.writer,
            tuple(numbers),
            _num_bytes(trees.tensors(runner.values[value])),
            memory.unsaved[value],
            tuple(
                number
                for number in (value.writer, *numbers)
                if number >= 0 and value not in memory.needed_until_w[number]
            ),
        )
        for value, numbers in readers.items()
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors as they are sent or saved: each on its own, without sharing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
