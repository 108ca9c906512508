"""Layers that change what they are given, as `x += 1` does, where this memory is not theirs alone.

In a plain loop whoever reads a value afterwards sees the change, and so does who reads a tensor in
the same memory. Within a stage that is so here too. What enters a stage may be memory that others
use: the loader's batch, a value that several stages read, what a recomputation begins with. A stage
that changes what enters is given a copy. Which stages do is seen when they first run, by the
version that torch counts up with every change: a copy for all would cost each an activation more.

A change that a later stage would have to see is refused: the value went there straight from the
stage that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import Value
from stageline.runtime.exactness.randomness import is_of_torch
from stageline.runtime.exactness.strided_copy import exact_copy, share_memory


class Mark(IntFlag):
    """What a stage must know of a tensor's memory before it changes it."""

    NONE = 0
    BORROWED = 1  # others use the memory: change a copy
    ALIASED = 2  # another tensor between stages is in the same memory: do not change it at all


Marks = Mapping[tuple[Value, int], Mark]  # by value and position of the tensor in it
NO_MARKS: Marks = {}


@dataclass(frozen=True)
class Entering:
    """A tensor that enters a stage."""

    value: Value
    original: Tensor
    mark: Mark
    given: Tensor  # what the stage works on: the original, or a copy of it
    version: int  # of `given`, before the stage runs

    @property
    def is_changed(self) -> bool:
        return version_of(self.given) != self.version

    @property
    def is_borrowed(self) -> bool:
        return bool(self.mark) and self.given is self.original


class InPlace:
    """State: which values the stage was seen to leave alone, in training, evaluation, …"""

    def __init__(
        self, modules: Sequence[nn.Module], shared: Iterable[Value], read_later: Iterable[Value]
    ) -> None:
        self.modules = modules
        self.is_gentle = all(map(leaves_alone, modules))
        self.shared = frozenset(shared)  # values whose memory others use
        self.read_later = frozenset(read_later)  # values that later stages read as well
        self.seen: dict[object, bool] = {}  # whether a value was left alone

    def entering(self, value: Value, tensor: Tensor, mark: Mark, *, is_kept: bool) -> Entering:
        """Give the stage a tensor, or a copy; `is_kept`: a recomputation will begin with it."""
        if is_kept or value in self.shared:
            mark |= Mark.BORROWED
        is_trusted = self.is_gentle or self.seen.get(self._key(value), False)
        given = tensor
        if not is_trusted:
            given = exact_copy(tensor).requires_grad_(tensor.requires_grad)
        return Entering(value, tensor, mark, given, version_of(given))

    def look(self, layer: str, items: Sequence[Entering]) -> None:
        """Raise an error if a layer changed what it must not; called after each layer."""
        for item in items:
            if item.is_changed:
                self._refuse_if_visible(layer, item, items)
                if item.is_borrowed:
                    self.seen[self._key(item.value)] = False
                    raise ModelError(
                        f"layer {layer!r} changed what it was given in place, but not when it "
                        "first ran, and others may read it too: run the step again, or let the "
                        "layer change a clone"
                    )

    def note(self, items: Sequence[Entering]) -> None:
        """Remember which values the layers of this stage left alone; called after all of them."""
        for item in items:
            key = self._key(item.value)
            self.seen[key] = self.seen.get(key, True) and not item.is_changed

    def leaving(
        self, sent: Sequence[tuple[Value, int, Tensor]], items: Sequence[Entering]
    ) -> dict[tuple[Value, int], Mark]:
        """Return marks of tensors that are in the memory of others, if there are any."""
        marks: dict[tuple[Value, int], Mark] = {}
        for number, (value, position, tensor) in enumerate(sent):
            mark = Mark.NONE
            for item in items:
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

    def _refuse_if_visible(self, layer: str, changed: Entering, items: Sequence[Entering]) -> None:
        name = changed.value.name
        if changed.value in self.read_later:
            raise ModelError(
                f"layer {layer!r} changes {name!r} in place, but a later stage reads it as it was "
                "written, without the change: change a clone of it, or write it under a new name"
            )
        others = (item.original for item in items if item is not changed)
        is_aliased = changed.mark & Mark.ALIASED
        if is_aliased or any(share_memory(changed.original, other) for other in others):
            raise ModelError(
                f"layer {layer!r} changes {name!r} in place, which shares its memory with another "
                "tensor that crosses between stages, and that one would not follow: clone one of "
                "them where they are made"
            )

    def _key(self, value: Value) -> object:
        training = tuple(module.training for module in self.modules)
        return value, training, torch.is_grad_enabled()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was changed; inference tensors do not count that."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  there is no public name


def leaves_alone(module: nn.Module) -> bool:
    """Return whether a module is known to change none of its inputs in place.

    Only modules of torch.nn are, if they are not told to work in place and have no hooks.
    """
    return all(
        is_of_torch(part)
        and not getattr(part, "inplace", False)
        and not (part._forward_hooks or part._forward_pre_hooks)  # noqa: SLF001  no public name
        for part in module.modules()
    )
