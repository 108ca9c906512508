"""State that layers change in a forward, such as a moving average in a buffer, or a counter.

A recomputation starts from the state before the first forward, and does not affect what the state
has become since:

    forward 0      state 0 ─► state 1       state 0 is kept for the recomputation, if it changed
    forward 1      state 1 ─► state 2
    recompute 0    state 0 ─► …             in the place of state 2, which is put back afterwards

State is buffers, and attributes of modules: tensors, numbers, text, generators of torch, Python and
numpy, and lists, tuples, dicts, sets and deques of them; and the global generators of Python and
numpy. Objects of other classes are not examined. Only tensors that were seen to change are copied;
all are copied once, when the stage first runs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.runtime.exactness.randomness import is_of_torch
from stageline.runtime.exactness.state_values import (
    GlobalGenerators,
    are_equal_generators,
    clone,
    copy_value,
    fingerprint,
    generator_state,
    generators_in,
    global_generators,
    restore_value,
    set_generator_state,
    set_global_generators,
)
from stageline.torch_private import (
    BatchNormBase,
    buffer_table,
    has_forward_pre_hooks,
    version_of,
)

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # every module has them; buffers come apart
GLOBAL_GENERATORS = RLock()  # guards the global generators of Python and numpy
ABSENT = object()  # in the place of an attribute that does not exist
Slot = tuple[dict[str, Any], str]  # a dict of a module, and a name in it


@dataclass(frozen=True)
class SavedSlot:
    """One buffer or attribute before a forward: a copy of its value, and its fingerprint."""

    table: dict[str, Any]
    name: str
    copied: Any
    fingerprint: object


@dataclass(frozen=True)
class StateSnapshot:
    """The state before a forward, or the part of it that the forward changed."""

    slots: Sequence[SavedSlot]
    generators: GlobalGenerators | None


class LayerState:
    """State: which tensors were seen to change, and whether global generators were used.

    To compare the global generators takes 0.1 ms, so a stage that did not use them when it first
    ran is trusted; that it starts to use them shows at the end of the step.
    """

    def __init__(self, modules: Iterable[nn.Module], *, has_norms: bool = False) -> None:
        """`has_norms`: include torch's own BatchNorm, whose statistics have their own rules."""
        self.modules = list(modules)
        parts = (part for module in self.modules for part in module.modules())
        self.parts = [p for p in parts if has_norms or not _is_norm(p)]
        self.changing: set[tuple[int, str]] | None = None  # None: it has not run yet
        self.uses_global_generators: bool | None = None  # None: not known

    @contextmanager
    def exclusive_generators(self) -> Iterator[None]:
        """Let only one stage at a time use the global generators.

        Held around a forward that uses them, and around the first, to see whether it does.
        """
        if self.uses_global_generators is False:
            yield
            return
        with GLOBAL_GENERATORS:
            before = global_generators()
            yield
            is_used = not are_equal_generators(before, global_generators())
            self.uses_global_generators = self.uses_global_generators or is_used

    def snapshot(self) -> StateSnapshot:
        """Return the present state, with copies of what may change."""
        copies: dict[int, Tensor] = {}
        slots = [
            SavedSlot(table, name, self._copied((table, name), copies), fingerprint(table[name]))
            for table, name in self._slots()
        ]
        is_used = self.uses_global_generators is not False
        return StateSnapshot(slots, global_generators() if is_used else None)

    def changed_since(self, before: StateSnapshot) -> StateSnapshot:
        """Return the part of an earlier state that has changed since then."""
        changed = [slot for slot in before.slots if _is_changed(slot)]
        known = {_key((slot.table, slot.name)) for slot in before.slots}
        changed += [
            SavedSlot(table, name, ABSENT, ABSENT)
            for table, name in self._slots()
            if _key((table, name)) not in known
        ]
        for slot in changed:
            self._check(slot)
        keys = {_key((slot.table, slot.name)) for slot in changed}
        self.changing = (self.changing or set()) | keys
        generators = before.generators
        if generators is not None and are_equal_generators(generators, global_generators()):
            generators = None
        return StateSnapshot(changed, generators)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Let forwards run on copies of the state, and put everything back afterwards."""
        before = LayerState(self.modules, has_norms=True).snapshot()  # with copies of all tensors
        known = {_key((slot.table, slot.name)) for slot in before.slots}
        with restored(before):
            try:
                yield
            finally:
                for table, name in [slot for slot in self._slots() if _key(slot) not in known]:
                    del table[name]

    def _check(self, slot: SavedSlot) -> None:
        """Raise ModelError for a tensor that was changed in place and had not been copied."""
        is_tensor = isinstance(slot.copied, Tensor)
        is_late = self.changing is not None and _key((slot.table, slot.name)) not in self.changing
        if is_tensor and is_late and slot.table.get(slot.name) is slot.copied:
            self.changing = {*(self.changing or ()), _key((slot.table, slot.name))}
            raise ModelError(
                f"the forward changed {slot.name!r} in place, but not when it first ran, and is to "
                "be recomputed from the old value: run the step again"
            )

    def _slots(self) -> Iterator[Slot]:
        for part in self.parts:
            buffers = buffer_table(part)
            for name in buffers:
                yield buffers, name
            if not is_of_torch(part) or has_forward_pre_hooks(part):
                attributes = vars(part)
                for name in attributes:
                    if name not in MODULE_ATTRIBUTES:
                        yield attributes, name

    def _copied(self, slot: Slot, copies: dict[int, Tensor]) -> Any:
        value = slot[0][slot[1]]
        if isinstance(value, Tensor):
            if self.changing is not None and _key(slot) not in self.changing:
                return value  # it has never changed
            if id(value) not in copies:
                copies[id(value)] = clone(value)
            return copies[id(value)]
        return copy_value(value)


@contextmanager
def restored(before: StateSnapshot | None) -> Iterator[None]:
    """Put an earlier state in place, and the present one back on leaving."""
    if before is None or not (before.slots or before.generators):
        yield
        return
    present = [(slot, slot.table.get(slot.name, ABSENT)) for slot in before.slots]
    states = [(g, generator_state(g)) for _, value in present for g in generators_in(value)]
    generators = global_generators()
    for slot in before.slots:
        _put(slot.table, slot.name, restore_value(slot.copied))
    if before.generators:
        set_global_generators(before.generators)
    try:
        yield
    finally:
        for slot, value in present:
            _put(slot.table, slot.name, value)
        for generator, state in states:
            set_generator_state(generator, state)
        if before.generators:
            set_global_generators(generators)


def _is_norm(part: nn.Module) -> bool:
    return isinstance(part, BatchNormBase) and is_of_torch(part)


def _key(slot: Slot) -> tuple[int, str]:
    return id(slot[0]), slot[1]


def _is_changed(slot: SavedSlot) -> bool:
    """Return whether a slot has changed.

    Batch norm changes its statistics without incrementing their version: values are compared.
    """
    now = slot.table.get(slot.name, ABSENT)
    if isinstance(now, Tensor) and isinstance(slot.copied, Tensor) and now is not slot.copied:
        return slot.fingerprint != fingerprint(now) or not torch.equal(now, slot.copied)
    return slot.fingerprint != fingerprint(now)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


@dataclass(frozen=True, eq=False)
class BufferSlot:
    """A buffer's dict and name: the tensor may be another one each time."""

    table: dict[str, Tensor | None]
    name: str


class BufferSnapshot:
    """Buffers before a forward, with copies of those that are known to change."""

    def __init__(self, buffers: Iterable[BufferSlot], changing: Container[BufferSlot]) -> None:
        self.before = [
            (
                slot,
                buffer,
                -1 if buffer is None else version_of(buffer),
                buffer.clone() if buffer is not None and slot in changing else None,
            )
            for slot, buffer in ((slot, slot.table.get(slot.name)) for slot in buffers)
        ]

    @property
    def changed(self) -> set[BufferSlot]:
        """Buffers that were changed in place, not those that were replaced."""
        return {
            slot
            for slot, buffer, version, _ in self.before
            if buffer is not None and version_of(buffer) != version
        }

    @torch.no_grad()
    def restore(self, layer: str) -> None:
        """Undo what a forward did to buffers; raise ModelError if one has not been copied."""
        for slot, buffer, version, copy in self.before:
            slot.table[slot.name] = buffer
            if buffer is not None and version_of(buffer) != version:
                if copy is None:
                    raise ModelError(
                        f"{layer!r} takes gradients inside its forward, or uses a weight in "
                        "another way than before, and its stage has to run again, but has changed "
                        f"buffer {slot.name!r}, as it did not in the first step: set gradients to "
                        "zero and run the step again"
                    )
                buffer.copy_(copy)
