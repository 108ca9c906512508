"""Layers that change their inputs in place, as `x += 1` does, where others use the same memory.

In a plain loop every later reader of a value sees the change, and so does a reader of another
tensor in the same memory. Within a stage this holds here too. But what enters a stage may be memory
that others use: the loader's batch, a value that several stages read, the inputs of a
recomputation. A stage that changes its inputs is given copies. Which stages do is observed when
they first run, by the version that torch increments with every change: copies for all stages would
cost each of them the memory of one more activation.

A change that a later stage would have to see is an error, because that stage receives the value
directly from the stage that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import Value
from stageline.runtime.exactness.randomness.seeded_draws import is_of_torch
from stageline.runtime.exactness.strided_copy import exact_copy, share_memory
from stageline.torch_private import has_forward_hooks, version_of


class Mark(IntFlag):
    """Who else uses the memory of a tensor that enters a stage."""

    NONE = 0
    BORROWED = 1  # others use it: change a copy only
    ALIASED = 2  # another tensor between stages is in it: do not change it at all


Marks = Mapping[tuple[Value, int], Mark]  # by value and position of the tensor in it
NO_MARKS: Marks = {}


class StageInput(NamedTuple):
    """A tensor that enters a stage."""

    value: Value
    original: Tensor
    mark: Mark
    given: Tensor  # the original or a copy of it, which the layers work on
    version: int  # of `given`, before the stage runs

    @property
    def is_changed(self) -> bool:
        return version_of(self.given) != self.version

    @property
    def is_borrowed(self) -> bool:
        return bool(self.mark) and self.given is self.original


class InPlaceChanges:
    """Decide which inputs of a stage are copied, and raise where a change would be lost.

    State: which values the stage left unchanged, by training mode and grad mode.
    """

    def __init__(
        self, modules: Sequence[nn.Module], shared: Iterable[Value], read_later: Iterable[Value]
    ) -> None:
        self.modules = modules
        self.is_never = all(map(never_changes_inputs, modules))
        self.shared = frozenset(shared)  # values whose memory others use
        self.read_later = frozenset(read_later)  # values that later stages read as well
        self.unchanged: dict[object, bool] = {}  # whether a value was left unchanged

    def take_in(
        self, value: Value, tensors: Sequence[Tensor], marks: Marks, *, is_kept: bool
    ) -> list[StageInput]:
        """Return the tensors of a value as inputs of the stage, or copies of them.

        `is_kept`: a recomputation will start from them.
        """
        own = Mark.BORROWED if is_kept or value in self.shared else Mark.NONE
        is_safe = self.is_never or self.unchanged.get(self._key(value), False)
        inputs = []
        for position, tensor in enumerate(tensors):
            mark = own | marks.get((value, position), own) if marks else own
            given = tensor if is_safe else exact_copy(tensor).requires_grad_(tensor.requires_grad)
            inputs.append(StageInput(value, tensor, mark, given, version_of(given)))
        return inputs

    def check_layer(self, layer: str, inputs: Sequence[StageInput]) -> None:
        """Raise ModelError if the layer that just ran changed an input that others use."""
        for item in inputs:
            if item.is_changed:
                self._check_visibility(layer, item, inputs)
                if item.is_borrowed:
                    self.unchanged[self._key(item.value)] = False
                    raise ModelError(
                        f"layer {layer!r} changed its input in place, but did not when it first "
                        "ran, and others may read the same memory: run the step again, or change "
                        "a clone"
                    )

    def record(self, inputs: Sequence[StageInput]) -> None:
        """Record which values all layers of the stage left unchanged."""
        for item in inputs:
            key = self._key(item.value)
            self.unchanged[key] = self.unchanged.get(key, True) and not item.is_changed

    def mark_outputs(
        self,
        sent: Sequence[tuple[Value, int, Tensor]],
        inputs: Sequence[StageInput],
        kept: Sequence[Tensor] = (),
    ) -> dict[tuple[Value, int], Mark]:
        """Return the marks of outputs whose memory is also that of others.

        `kept`: tensors that a recomputation will use.
        """
        marks: dict[tuple[Value, int], Mark] = {}
        for number, (value, position, tensor) in enumerate(sent):
            is_kept = any(share_memory(tensor, other) for other in kept)
            mark = Mark.BORROWED if is_kept else Mark.NONE
            for item in inputs:
                if share_memory(tensor, item.given):
                    mark |= Mark.BORROWED if item.is_borrowed else Mark.NONE
                    if item.value in self.read_later or item.mark & Mark.ALIASED:
                        mark |= Mark.ALIASED
            others = (o for i, (_, _, o) in enumerate(sent) if i != number)
            if any(share_memory(tensor, other) for other in others):
                mark |= Mark.ALIASED
            if mark:
                marks[value, position] = mark
        return marks

    def _check_visibility(
        self, layer: str, changed: StageInput, inputs: Sequence[StageInput]
    ) -> None:
        """Raise ModelError if a later stage would have to see the change."""
        name = changed.value.name
        if changed.value in self.read_later:
            raise ModelError(
                f"layer {layer!r} changes {name!r} in place, but a later stage reads it as it was "
                "written, without the change: change a clone of it, or write it under a new name"
            )
        others = (item.original for item in inputs if item is not changed)
        is_aliased = changed.mark & Mark.ALIASED
        if is_aliased or any(share_memory(changed.original, other) for other in others):
            raise ModelError(
                f"layer {layer!r} changes {name!r} in place, which shares its memory with another "
                "tensor that crosses between stages and would not see the change: clone one of "
                "them where they are made"
            )

    def _key(self, value: Value) -> object:
        return value, *[module.training for module in self.modules], torch.is_grad_enabled()


def never_changes_inputs(module: nn.Module) -> bool:
    """Return whether a module is known to change none of its inputs in place.

    This holds for modules of torch.nn without `inplace=True` and without hooks.
    """
    return all(
        is_of_torch(part) and not getattr(part, "inplace", False) and not has_forward_hooks(part)
        for part in module.modules()
    )
