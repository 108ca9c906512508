"""Bytes that layers keep for their backward, each counted once, for the layer that wrote it.

    linear ─► y ─► relu ─► z ─► linear ─► …     y: kept by nobody
                                                z: kept by both, and counted for the relu

What counts are storages that autograd saved, or that a backward in halves holds, as the runtime
runs it: neither weights and buffers, nor what the loader brought. One that passes between layers
belongs to the layer that wrote it first, whichever layers keep it; so it is in a stage's sum once,
and what comes from another stage is not in it at all. What a stage sends it keeps in any case, so
what no layer saves, as y here, is counted apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stageline.model.layers import INPUT, Value
from stageline.planning.profiling.momentary import momentary_bytes
from stageline.planning.profiling.solo import Solo
from stageline.runtime import trees
from stageline.runtime.stage.weight_calls import WeightCall

Storages = dict[int, int]  # bytes by identity, as long as somebody holds them


class Kept(NamedTuple):
    """Bytes of one layer."""

    activation: int  # from F until I
    retained: int  # the part of it that is kept until W
    waiting: int  # gradients, from I until W
    momentary: int  # while it runs


class Bytes(NamedTuple):
    """Of a model, for one micro-batch."""

    layers: list[Kept]
    unsaved: dict[Value, int]  # of what passes between layers, that none of them keeps
    needed: list[set[Value]]  # by layer, of what it writes or reads what it keeps until W


class Seen(NamedTuple):
    """What one layer keeps, whoever wrote it."""

    until_input_grad: Storages
    until_weight_grad: Storages
    waiting: int


class Box:
    """What autograd holds in place of a tensor; it is gone as soon as autograd lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def kept_bytes(solo: Solo) -> Bytes:
    """Runs all layers in their order, and puts down what they write."""
    owners = dict.fromkeys(_storages(_there_anyway(solo)), INPUT)
    inside: list[Kept] = []
    passed: tuple[Storages, Storages] = {}, {}  # until I and until W
    until_weight_grad: list[set[int]] = []  # by layer, the part of it that it keeps itself
    for number in range(len(solo.layers)):
        solo.forward(number, in_halves=True)  # at first a layer is watched, and given copies
        seen, written = _seen(solo, number)
        solo.values.update(written)  # held from now on, so their identities stay theirs
        for storage in _storages(_tensors(written.values())):
            owners.setdefault(storage, number)
        now, later, waiting = seen
        momentary = momentary_bytes(solo, number)
        own = _sum(now, owners, None), _sum(later, owners, None)
        inside.append(Kept(*own, waiting, momentary))
        for whole, part in zip(passed, (now, later), strict=True):
            whole.update({storage: size for storage, size in part.items() if storage in owners})
        until_weight_grad.append(later.keys() & owners.keys())
    layers = [
        Kept(
            own.activation + _sum(passed[0], owners, number),
            own.retained + _sum(passed[1], owners, number),
            own.waiting,
            own.momentary,
        )
        for number, own in enumerate(inside)
    ]
    there = {storage for storage, owner in owners.items() if owner == INPUT}
    needed = [_values_in(solo, storages) for storages in until_weight_grad]
    return Bytes(layers, _unsaved(solo, passed[0].keys() | there), needed)


def _unsaved(solo: Solo, saved: set[int]) -> dict[Value, int]:
    return {
        value: sum(n for storage, n in _storages(_tensors([tree])).items() if storage not in saved)
        for value, tree in solo.values.items()
    }


def _values_in(solo: Solo, storages: set[int]) -> set[Value]:
    return {v for v, tree in solo.values.items() if storages & _storages(_tensors([tree])).keys()}


def _sum(storages: Storages, owners: dict[int, int], owner: int | None) -> int:
    """Of those with this owner."""
    return sum(size for storage, size in storages.items() if owners.get(storage) == owner)


def _seen(solo: Solo, number: int) -> tuple[Seen, dict[Value, Any]]:
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        run = solo.forward(number, in_halves=True)
    until_input_grad = _storages(_held(boxes, run.waiting.graphs[0].calls))
    solo.backward(run, solo.ones(run))
    owed, _ = run.waiting.deferred[0]
    until_weight_grad = _storages(_held(boxes, owed))
    gradients = (gradient for call in owed for gradient in call.gradients if gradient is not None)
    waiting = sum(_storages(gradients).values())
    solo.forget_gradients(number)
    return Seen(until_input_grad, until_weight_grad, waiting), run.written


def _held(boxes: list[weakref.ref[Box]], calls: Iterable[WeightCall]) -> Iterator[Tensor]:
    for reference in boxes:
        if (box := reference()) is not None:
            yield box.tensor
    for call in calls:
        yield from call.leaves


def _there_anyway(solo: Solo) -> Iterator[Tensor]:
    """Weights, buffers and what the loader brought."""
    yield from _tensors(tree for value, tree in solo.values.items() if value.writer == INPUT)
    yield from trees.tensors(solo.target.target if solo.target else None)
    yield from solo.layers.modules.parameters()
    yield from solo.layers.modules.buffers()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for tree in values:
        yield from trees.tensors(tree)


def _storages(tensors: Iterable[Tensor]) -> Storages:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}  # noqa: SLF001  its address
