"""State that layers change in a forward, such as a moving average in a buffer, or a counter.

A recomputation starts from the state before the first forward, and does not affect what the state
has become since:

    forward 0      state 0 ─► state 1       state 0 is kept for the recomputation, if it changed
    forward 1      state 1 ─► state 2
    recompute 0    state 0 ─► …             in the place of state 2, which is put back afterwards

A forward that has to run again at once, in another way, first undoes what it did to the state.

State is buffers, and attributes of modules: tensors, numbers, text, generators of torch, Python and
numpy, and lists, tuples, dicts, sets and deques of them; and the global generators of Python and
numpy. Objects of other classes are not examined. Only tensors that were seen to change are copied;
all are copied once, when the stage first runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.runtime.accelerators.host_waits import HostRead, equal_on_host
from stageline.runtime.exactness.randomness.seeded_draws import is_of_torch
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
    DataDependentOutputException,
    NormBase,
    buffer_table,
    has_forward_pre_hooks,
)

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # every module has them; buffers come apart
GLOBAL_GENERATORS = RLock()  # guards the global generators of Python and numpy
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
ABSENT = object()  # in the place of an attribute that does not exist


class SavedSlot(NamedTuple):
    """One buffer or attribute before a forward: its value, a copy, and the value's fingerprint.

    A tensor that is not expected to change is its own copy.
    """

    table: dict[str, Any]
    name: str
    value: Any
    copied: Any
    fingerprint: object

    @property
    def key(self) -> tuple[int, str]:
        return id(self.table), self.name


class StateSnapshot(NamedTuple):
    """The state before a forward, or the part of it that the forward changed."""

    slots: Sequence[SavedSlot]
    generators: GlobalGenerators | None


class LayerState:
    """State: which tensors were seen to change, and whether global generators were used.

    To compare the global generators takes 0.1 ms, so a stage that did not use them when it first
    ran is trusted; that it starts to use them shows at the end of the step.
    """

    def __init__(self, modules: Iterable[nn.Module], *, has_norms: bool = False) -> None:
        """Look at the state of modules.

        `has_norms`: include torch's own BatchNorm. With batch_norm="minibatch" no forward changes
        its statistics.
        """
        self.modules = list(modules)
        parts = (part for module in self.modules for part in module.modules())
        self.parts = [
            (part, buffer_table(part), is_of_torch(part))
            for part in parts
            if has_norms or not _is_batch_norm(part)
        ]
        # their functions change the statistics without incrementing their version
        self.norms = {id(buffers) for p, buffers, _ in self.parts if isinstance(p, NormBase)}
        self.changing: set[tuple[int, str]] | None = None  # None: it has not run yet
        self.uses_global_generators: bool | None = None  # None: not known

    def exclusive_generators(self) -> AbstractContextManager[None]:
        """Let only one stage at a time use the global generators.

        Held around a forward that uses them, and around the first, to see whether it does.
        """
        return nullcontext() if self.uses_global_generators is False else self._held_generators()

    @contextmanager
    def _held_generators(self) -> Iterator[None]:
        with GLOBAL_GENERATORS:
            before = global_generators()
            yield
            is_used = not are_equal_generators(before, global_generators())
            self.uses_global_generators = self.uses_global_generators or is_used

    def snapshot(self) -> StateSnapshot:
        """Return the present state, with copies of what may change."""
        copies: dict[int, Tensor] = {}
        slots = [
            SavedSlot(table, name, value, *self._copied(table, name, value, copies))
            for table, name, value in self._slots()
        ]
        is_used = self.uses_global_generators is not False
        return StateSnapshot(slots, global_generators() if is_used else None)

    def learn(self, before: StateSnapshot) -> None:
        """Remember what a forward changed, so that it is copied from now on."""
        self._remember(self._changed(before))

    def changed_since(self, before: StateSnapshot) -> StateSnapshot:
        """Return the part of an earlier state that has changed since then, and remember it.

        Raise ModelError if a tensor was changed in place that had not been copied.
        """
        changed = self._changed(before)
        late = [slot for slot in changed if _is_overwritten(slot)]
        self._remember(changed)
        if late:
            raise ModelError(
                f"the forward changed {late[0].name!r} in place, but not when it first ran, and is "
                "to be recomputed from the old value: run the step again"
            )
        generators = before.generators
        if generators is not None and are_equal_generators(generators, global_generators()):
            generators = None
        # without the values themselves: a forward may have replaced them
        return StateSnapshot([slot._replace(value=None) for slot in changed], generators)

    def undo(self, before: StateSnapshot, layer: str) -> None:
        """Undo what a forward did to the state, so that it can run again."""
        changed = self._changed(before)
        late = [slot for slot in changed if _is_overwritten(slot)]
        self._remember(changed)
        if late:
            raise ModelError(
                f"{layer!r} takes gradients inside its forward, or uses a weight in another way "
                f"than before, and its stage has to run again, but has changed {late[0].name!r} in "
                "place, as it did not in the first step: set gradients to zero and run the step "
                "again"
            )
        for slot in changed:
            if isinstance(slot.value, Tensor):
                if slot.copied is not slot.value:
                    # by .data: graphs of other micro-batches may have saved running statistics, and
                    # refuse a backward if their version has changed
                    slot.value.data.copy_(slot.copied)
                slot.table[slot.name] = slot.value
            else:
                _put(slot.table, slot.name, restore_value(slot.copied))
        if before.generators is not None:
            set_global_generators(before.generators)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Let forwards run on copies of the state, and put everything back afterwards."""
        before = LayerState(self.modules, has_norms=True).snapshot()  # with copies of all tensors
        with restored(before):
            try:
                yield
            finally:
                for slot in self._added(before):
                    del slot.table[slot.name]

    def _changed(self, before: StateSnapshot) -> list[SavedSlot]:
        """Return the slots that have changed, and those that did not exist."""
        is_first = self.changing is None
        changed = (slot for slot in before.slots if _is_changed(slot, compares=is_first))
        return [*changed, *self._added(before)]

    def _added(self, before: StateSnapshot) -> list[SavedSlot]:
        known = {slot.key for slot in before.slots}
        added = [(t, name) for t, name, _ in self._slots() if (id(t), name) not in known]
        return [SavedSlot(table, name, ABSENT, ABSENT, ABSENT) for table, name in added]

    def _remember(self, changed: Iterable[SavedSlot]) -> None:
        self.changing = (self.changing or set()) | {slot.key for slot in changed}

    def _slots(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield the dict, the name and the value of each buffer and attribute."""
        for part, buffers, is_plain in self.parts:
            for name, buffer in buffers.items():
                yield buffers, name, buffer
            if not is_plain or has_forward_pre_hooks(part):
                attributes = vars(part)
                for name, value in attributes.items():
                    if name not in MODULE_ATTRIBUTES:
                        yield attributes, name, value

    def _copied(
        self, table: dict[str, Any], name: str, value: Any, copies: dict[int, Tensor]
    ) -> tuple[Any, object]:
        """Return a copy of a value, if it may change, and its fingerprint."""
        if type(value) in PLAIN:  # most are, and this is fast
            return value, (type(value), value)
        if isinstance(value, Tensor):
            is_known = self.changing is not None and (id(table), name) not in self.changing
            if is_known and id(table) not in self.norms:
                return value, fingerprint(value)  # it has never changed
            if id(value) not in copies:
                copies[id(value)] = clone(value)
            return copies[id(value)], fingerprint(value)
        return copy_value(value), fingerprint(value)


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


def _is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, BatchNormBase) and is_of_torch(part)


def _is_changed(slot: SavedSlot, *, compares: bool) -> bool:
    """Return whether a slot has changed.

    Batch norm changes its statistics without incrementing their version. So values are compared
    when the stage first runs; later, what was copied counts as changed, because to compare would
    make the host wait for a device.
    """
    now = slot.table.get(slot.name, ABSENT)
    if isinstance(now, Tensor) and isinstance(slot.copied, Tensor) and now is not slot.copied:
        if slot.fingerprint != fingerprint(now):
            return True
        return not (compares and _has_equal_values(now, slot.copied))
    return slot.fingerprint != fingerprint(now)


def _has_equal_values(tensor: Tensor, copied: Tensor) -> bool:
    """Return whether two tensors are equal; fake tensors, as in an estimate, have no values."""
    if tensor.layout != torch.strided:
        return True  # nothing compares sparse tensors, but their versions tell of changes
    try:
        return equal_on_host(tensor, copied, HostRead.STATE_IN_THE_FIRST_STEP)
    except DataDependentOutputException:
        return True


def _is_overwritten(slot: SavedSlot) -> bool:
    """Return whether a tensor was changed in place that had not been copied.

    Those that every forward computes anew, as a normalised weight, do not count.
    """
    if not isinstance(slot.value, Tensor) or slot.copied is not slot.value:
        return False
    return slot.value.is_leaf and fingerprint(slot.value) != slot.fingerprint


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        table.pop(name, None)
    else:
        table[name] = value
