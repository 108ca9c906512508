"""Leave a model as it was when its forward is run for a look at it."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.device_settings import preserved_generators
from stageline.torch_private import MODULE_TABLES

PARAMETERS, _, MODULES = MODULE_TABLES
CREATED = (PARAMETERS, MODULES)
CONTAINERS = frozenset({list, set, deque, dict, OrderedDict, defaultdict})


@contextmanager
def preserved_values(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random states; refuse random numbers that are not torch's."""
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    before, dtype = _foreign_random_states(), torch.get_default_dtype()
    try:
        with preserved_generators():
            yield
            drew = _foreign_random_states() != before
    finally:
        _set_foreign_random_states(before)
        torch.set_default_dtype(dtype)
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)
    if drew:
        raise ModelError(
            f"{type(model).__name__}'s forward draws random numbers from Python or numpy, outside "
            "of its layers, where they would be the same in each step: use torch's"
        )


@contextmanager
def preserved_foreign_random() -> Iterator[None]:
    """Restore the random states of Python and numpy: a layer may draw from them."""
    before = _foreign_random_states()
    try:
        yield
    finally:
        _set_foreign_random_states(before)


def _foreign_random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def _set_foreign_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        numpy = sys.modules["numpy"]
        name, keys, *rest = states[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))


class Change(NamedTuple):
    """An attribute that the recorded code has set on a module."""

    module: nn.Module
    name: str  # of the module
    key: str
    value: Any
    frozen: Any  # the value with its items at that time


class AttributeLog:
    """Which attributes a forward sets, outside of opaque modules.

    State: the attributes as they were, and as opaque modules have left their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kind = type(model).__name__
        self.names = {module: name for name, module in model.named_modules()}
        self.start = {module: Attributes(module) for module in self.names}
        self.original = self.start
        self.expected = dict(self.start)
        self.noted: list[Change] = []

    def accept(self, modules: Iterable[nn.Module]) -> None:
        """Take in what opaque modules have set themselves: they will do so again."""
        self.expected |= {module: Attributes(module) for module in modules}

    def note(self, modules: Iterable[nn.Module]) -> list[Change]:
        """Return and keep what was set on opaque modules before they are called."""
        found = self._changes(modules)
        self.noted += found
        return found

    def changes(self) -> list[Change]:
        """Return what was set, but not by opaque modules."""
        return self.noted + self._changes(self.names)

    def _changes(self, modules: Iterable[nn.Module]) -> list[Change]:
        found = []
        for module in modules:
            now = vars(module)
            keys = self.expected[module].changed_keys() if module in self.expected else ()
            name = self.names.get(module, "")
            found += [Change(module, name, k, now.get(k), _frozen(now.get(k))) for k in keys]
        return found

    def full_name(self, change: Change) -> str:
        """Return the attribute's name; that of the first one that differs in a module's tables."""
        key = change.key
        if key in MODULE_TABLES:
            frozen = self.start[change.module].items[key]
            before = dict(zip(frozen.keys, frozen.items, strict=True))
            names = {**before, **change.value}
            key = next((n for n in names if before.get(n) is not change.value.get(n)), key)
        return f"{change.name or self.kind}.{key}"

    def restore(self, keep: Iterable[Change] = ()) -> None:
        """Restore all attributes, except for the changes that are kept."""
        for attributes in self.start.values():
            attributes.restore()
        for change in keep:
            vars(change.module)[change.key] = _restored(change.frozen)
        if keep:
            self.start = {module: Attributes(module) for module in self.names}
        self.expected, self.noted = dict(self.start), []

    def restore_original(self) -> None:
        """Restore all attributes, those that were kept as well."""
        for attributes in self.original.values():
            attributes.restore()


class Attributes:
    """A module's attributes at one time, with the items of lists and dicts in them."""

    def __init__(self, module: nn.Module) -> None:
        self.table = vars(module)
        self.items = {k: _frozen(v) for k, v in self.table.items() if k != "training"}

    def changed_keys(self) -> list[str]:
        """Return the names of attributes that are others now; those in a model's tables first."""
        keys = {**self.items, **self.table}.keys() - {"training"}
        changed = [key for key in keys if not self._is_same(key)]
        return sorted(changed, key=lambda key: (key not in MODULE_TABLES, key))

    def restore(self) -> None:
        """Set the attributes that have changed to what they were."""
        for key in self.changed_keys():
            if key in self.items:
                self.table[key] = _restored(self.items[key])
            else:
                del self.table[key]

    def _is_same(self, key: str) -> bool:
        if key not in self.items or key not in self.table:
            return False
        return _is_same(self.items[key], self.table[key])


@contextmanager
def preserved_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules, which a forward without data would set to meta tensors."""
    before = [Attributes(module) for module in modules]
    try:
        yield
    finally:
        for attributes in before:
            attributes.restore()


class Frozen(NamedTuple):
    """A container with the items that it had."""

    container: Any
    keys: list[Any]
    items: list[Any]


def _frozen(value: Any) -> Any:
    if type(value) not in CONTAINERS:
        return value
    if isinstance(value, dict):
        return Frozen(value, list(value), [_frozen(each) for each in value.values()])
    return Frozen(value, [], [_frozen(each) for each in value])


def _is_same(before: Any, now: Any) -> bool:
    if not isinstance(before, Frozen):
        is_plain = isinstance(before, trees.PLAIN) and isinstance(now, trees.PLAIN)
        return before is now or (is_plain and before == now)
    if before.container is not now or len(before.items) != len(now):
        return False
    items = now.values() if isinstance(now, dict) else now
    same_keys = not isinstance(now, dict) or before.keys == list(now)
    return same_keys and all(map(_is_same, before.items, items))


def unfrozen(frozen: Any) -> Any:
    """Return a value with the items that it had, in other containers than its own."""
    if not isinstance(frozen, Frozen):
        return frozen
    items = [unfrozen(each) for each in frozen.items]
    return dict(zip(frozen.keys, items, strict=True)) if frozen.keys else items


def _restored(frozen: Any) -> Any:
    if not isinstance(frozen, Frozen):
        return frozen
    container, items = frozen.container, [_restored(each) for each in frozen.items]
    if isinstance(container, dict):
        pairs = zip(frozen.keys, items, strict=True)
        container.clear()
        container.update(pairs)
    elif isinstance(container, set):
        container.clear()
        container.update(items)
    else:
        container.clear()
        container.extend(items)
    return container


def raise_changed(attribute: str) -> NoReturn:
    raise ModelError(
        f"the forward sets {attribute!r} anew each time, which would happen in the recording only: "
        "return the value, keep it in a buffer that is changed in place, or name the module in "
        "opaque="
    )


def raise_created(what: str, line: str) -> NoReturn:
    raise ModelError(
        f"{line}: {what} a module or parameter that the forward has made, but they have to exist "
        "before the model is cut: call the model once on a batch before, or make them in __init__"
    )
