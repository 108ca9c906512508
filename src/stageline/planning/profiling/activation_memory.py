"""Measure the bytes that layers keep for their backward, attributed to the layer that wrote them.

    linear ─► y ─► relu ─► z ─► linear ─► …     y: saved by no layer
                                                z: saved by two layers, attributed to the relu

Counted are the storages that autograd saves, or that a backward in halves keeps, as the runtime
runs it; weights, buffers and the inputs from the data loader are not counted. A storage that passes
between layers belongs to the layer that wrote it first, whichever layers keep it. So the sum over a
stage's layers has it once, and has nothing that comes from another stage. A stage keeps in any case
what it sends, so bytes that no layer saves, as y here, are reported separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stageline.model import trees
from stageline.model.layers import INPUT, Value
from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.planning.profiling.temporary_memory import temporary_bytes
from stageline.runtime.stage.weight_calls import WeightCall
from stageline.torch_private import storage_identity

Storages = dict[int, int]  # bytes by address, which is unique as long as the storage is alive


class LayerBytes(NamedTuple):
    """The memory of one layer, in bytes."""

    activation: int  # from F until I
    retained: int  # the part of it that is kept until W
    waiting: int  # gradients, from I until W
    temporary: int  # only while it runs
    results: int = 0  # of costly operators, which selective recomputation keeps


class ModelBytes(NamedTuple):
    """The memory of a model's layers for one micro-batch."""

    layers: list[LayerBytes]
    unsaved: dict[Value, int]  # bytes of a value between layers that no layer saves
    needed_until_w: list[set[Value]]  # by layer, the values that it keeps until W


class SavedByLayer(NamedTuple):
    """The storages that one layer keeps, whichever layer wrote them."""

    until_input_grad: Storages
    until_weight_grad: Storages
    waiting: int


class SavedTensor:
    """Stands for a tensor that autograd saved; garbage collected as soon as autograd frees it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def measure_activation_bytes(runner: LayerRunner) -> ModelBytes:
    """Run all layers in order, keep what they write, and return the memory that they need."""
    owners = dict.fromkeys(_storages(_permanent_tensors(runner)), INPUT)
    internal: list[LayerBytes] = []  # of storages that do not pass between layers
    shared_until_i: Storages = {}  # those that do
    shared_until_w: Storages = {}
    needed_until_w: list[set[int]] = []  # by layer, the shared ones that it keeps itself
    for number in range(len(runner.layers)):
        runner.forward(number, in_halves=True)  # a first run is watched, and gets copies
        saved, written = _measure_saved(runner, number)
        runner.values.update(written)  # keeps them alive, so that addresses stay unique
        for storage in _storages(_tensors(written.values())):
            owners.setdefault(storage, number)
        until_i, until_w, waiting = saved
        temporary = temporary_bytes(runner, number)
        own = _sum_owned(until_i, owners, None), _sum_owned(until_w, owners, None)
        internal.append(LayerBytes(*own, waiting, temporary, _result_bytes(runner, number)))
        shared_until_i |= {key: size for key, size in until_i.items() if key in owners}
        shared_until_w |= {key: size for key, size in until_w.items() if key in owners}
        needed_until_w.append(until_w.keys() & owners.keys())
    layers = [
        own._replace(
            activation=own.activation + _sum_owned(shared_until_i, owners, number),
            retained=own.retained + _sum_owned(shared_until_w, owners, number),
        )
        for number, own in enumerate(internal)
    ]
    permanent = {storage for storage, owner in owners.items() if owner == INPUT}
    unsaved = _unsaved_bytes(runner, shared_until_i.keys() | permanent)
    return ModelBytes(layers, unsaved, [_values_in(runner, keys) for keys in needed_until_w])


def _result_bytes(runner: LayerRunner, number: int) -> int:
    """Return the bytes of the results that selective recomputation keeps of a layer."""
    return sum(_storages(runner.keep_results(number).results).values())


def _unsaved_bytes(runner: LayerRunner, saved: set[int]) -> dict[Value, int]:
    return {
        value: sum(n for key, n in _storages(_tensors([tree])).items() if key not in saved)
        for value, tree in runner.values.items()
    }


def _values_in(runner: LayerRunner, storages: set[int]) -> set[Value]:
    """Return the values between layers that are in these storages."""
    return {
        value
        for value, tree in runner.values.items()
        if storages & _storages(_tensors([tree])).keys()
    }


def _sum_owned(storages: Storages, owners: dict[int, int], owner: int | None) -> int:
    """Return the bytes of the storages of one owner; None for those without one."""
    return sum(size for storage, size in storages.items() if owners.get(storage) == owner)


def _measure_saved(runner: LayerRunner, number: int) -> tuple[SavedByLayer, dict[Value, Any]]:
    """Run F, I and W of one layer; return the storages that it keeps, and the values it writes."""
    references: list[weakref.ref[SavedTensor]] = []

    def pack(tensor: Tensor) -> SavedTensor:
        saved = SavedTensor(tensor)
        references.append(weakref.ref(saved))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        run = runner.forward(number, in_halves=True)
    until_input_grad = _storages(_alive(references, run.waiting.graphs[0].calls))
    runner.backward(run, runner.output_gradients(run))
    calls, _ = run.waiting.deferred[0]
    until_weight_grad = _storages(_alive(references, calls))
    gradients = (gradient for call in calls for gradient in call.gradients if gradient is not None)
    waiting = sum(_storages(gradients).values())
    runner.zero_grad(number)
    return SavedByLayer(until_input_grad, until_weight_grad, waiting), run.written


def _alive(
    references: list[weakref.ref[SavedTensor]], calls: Iterable[WeightCall]
) -> Iterator[Tensor]:
    for reference in references:
        if (saved := reference()) is not None:
            yield saved.tensor
    for call in calls:
        yield from call.leaves


def _permanent_tensors(runner: LayerRunner) -> Iterator[Tensor]:
    """Yield weights, buffers, and the inputs and targets from the data loader."""
    yield from _tensors(tree for value, tree in runner.values.items() if value.writer == INPUT)
    yield from trees.tensors(runner.target.target if runner.target else None)
    yield from runner.layers.modules.parameters()
    yield from runner.layers.modules.buffers()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for tree in values:
        yield from trees.tensors(tree)


def _storages(tensors: Iterable[Tensor]) -> Storages:
    return {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
