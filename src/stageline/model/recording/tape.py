"""A tape: what a forward did, as operations on named values.

    input_ids ─► embed ─► embed[0] ─► layers.0 ─► layers.0[0] ─┬─► add ─► …
                                └──────────────────────────────┘

Operations are calls of opaque modules, and the functions of torch between them. The arguments of an
operation are a tree in which references stand for tensors; everything else in it is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from stageline.model import trees
from stageline.model.device_settings import device_types

START = "start"  # in the place of a module's name, before the first call


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, positional and named


class ValueRef(NamedTuple):
    """Stands for a tensor of the batch, or one that an operation wrote."""

    name: str


class StateRef(NamedTuple):
    """Stands for a parameter or buffer, by its name in the model."""

    name: str


class DeviceRef(NamedTuple):
    """Stands for the device of the batch, which is another one on each rank."""


@dataclass(frozen=True)
class Template:
    """The arguments or the result of a call, with references in the place of tensors."""

    leaves: tuple[Any, ...]
    spec: trees.Spec

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Return the names of the values in it, each once."""
        names = (leaf.name for leaf in self.leaves if type(leaf) is ValueRef)
        return tuple(dict.fromkeys(names))

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Return the names of the parameters and buffers in it, each once."""
        names = (leaf.name for leaf in self.leaves if type(leaf) is StateRef)
        return tuple(dict.fromkeys(names))

    def fill(self, values: Mapping[str, Any], state: Callable[[str], Any]) -> Any:
        """Return the tree with tensors in the place of references."""
        return self.filler(values, state)

    @cached_property
    def filler(self) -> Callable[[Mapping[str, Any], Callable[[str], Any]], Any]:
        """The function that `fill` calls."""
        return _tree_filler(iter(self.leaves), self.spec)


Filler = Callable[[Mapping[str, Any], Callable[[str], Any]], Any]
CONSTANT, VALUE, MADE = range(3)


class Item(NamedTuple):
    """A part of a tree: a constant, the name of a value, or a function that makes it."""

    kind: int
    item: Any


def _tree_filler(leaves: Iterator[Any], spec: trees.Spec) -> Filler:
    """Return a function that makes the tree; without searching it for references each time."""
    kind, item = _item(leaves, spec)
    if kind == VALUE:
        return lambda values, _: values[item]
    if kind == CONSTANT:
        return lambda _values, _state: item
    made: Filler = item
    return made


def _item(leaves: Iterator[Any], spec: trees.Spec) -> Item:
    kind = spec.type
    if kind is None:
        return _leaf(next(leaves))
    parts = [_item(leaves, child) for child in spec.children]
    if kind is tuple:
        if all(part.kind == CONSTANT for part in parts):
            return Item(CONSTANT, tuple(part.item for part in parts))
        return Item(MADE, lambda values, state: tuple(_filled(parts, values, state)))
    if kind is list:
        return Item(MADE, lambda values, state: _filled(parts, values, state))
    if kind is dict:
        keys = spec.context
        if not keys:
            return Item(MADE, lambda _values, _state: {})
        return Item(
            MADE,
            lambda values, state: dict(zip(keys, _filled(parts, values, state), strict=True)),
        )
    flat = trees.Spec(kind, spec.context, (trees.LEAF,) * len(parts))
    return Item(MADE, lambda values, state: trees.unflatten(_filled(parts, values, state), flat))


def _filled(parts: list[Item], values: Mapping[str, Any], state: Callable[[str], Any]) -> list[Any]:
    return [
        values[item] if kind == VALUE else item if kind == CONSTANT else item(values, state)
        for kind, item in parts
    ]


def _leaf(leaf: Any) -> Item:
    if type(leaf) is ValueRef:
        return Item(VALUE, leaf.name)
    if type(leaf) is StateRef:
        name = leaf.name
        return Item(MADE, lambda _, state: state(name))
    if type(leaf) is DeviceRef:
        return Item(MADE, lambda values, _: device_of(values))
    return Item(CONSTANT, leaf)


DEVICE = "<device>"  # the name of the device among values, where no tensor may be left to tell it


def device_of(values: Mapping[str, Any]) -> torch.device:
    """Return the device that values are on."""
    if DEVICE in values:
        known: torch.device = values[DEVICE]
        return known
    found = next((v for v in values.values() if isinstance(v, torch.Tensor)), None)
    return torch.device("cpu") if found is None else found.device


class Context(NamedTuple):
    """The modes in which an operation ran, where they differ from those of the whole forward."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, Any], ...]  # kind of device, whether it is on, dtype

    @staticmethod
    def current() -> Context:
        return Context(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in device_types()
            ),
        )


class Renaming(NamedTuple):
    """A value that an operation changed in place, with the name it has from then on."""

    old: str
    new: str


class InnerOutput(NamedTuple):
    """A tensor inside an opaque module that the code around it uses.

    A submodule returned it and a hook took it out, or a module set it as an attribute of its own.
    """

    path: str  # of the submodule, or of the module that has the attribute
    call: int  # which of its calls
    leaf: int  # which of the tensors that it returned, or of those in the attribute
    attribute: str = ""


@dataclass(frozen=True)
class Operation:
    """A call of a module or of a function."""

    target: str | Callable[..., Any]  # the name of an opaque module, or a function
    arguments: Template  # a pair: positional and named
    writes: tuple[str, ...]  # names of the tensors in its result, and of `inner`
    renamed: tuple[Renaming, ...] = ()
    constants: tuple[Any, ...] = ()  # what the result has beside tensors
    context: Context | None = None
    is_random: bool = False
    is_guard: bool = False  # the model went on by what it found in `constants`
    by_chance: bool = False  # a guard of random numbers
    line: str = ""  # of the model's code
    num_bytes: tuple[int, ...] = ()  # of `writes`
    shapes: tuple[str, ...] = ()  # of `writes`, for people
    call: str = ""  # the name of a module's call: that of the module, and `@2` for the second
    inner: tuple[InnerOutput, ...] = ()

    @property
    def module(self) -> str | None:
        return self.target if isinstance(self.target, str) else None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        names = (*self.arguments.values, *(pair.old for pair in self.renamed))
        return tuple(dict.fromkeys(names))

    @cached_property
    def all_writes(self) -> tuple[str, ...]:
        return (*self.writes, *(pair.new for pair in self.renamed))


def shape_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor.

    >>> shape_text(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    shape = "[nested]" if tensor.is_nested else list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"


@dataclass(frozen=True)
class Tape:
    """All operations of a forward, in order, and its result."""

    operations: tuple[Operation, ...]
    output: Template
    inputs: tuple[str, ...]  # the names of the batch's tensors
    has_gradient: frozenset[str]  # those of them that require gradients
    # First and last operations that must not be parted: the last changes, in place, memory that a
    # value of the first shares.
    inseparable: tuple[tuple[int, int], ...]
    hidden_losses: tuple[str, ...] = ()  # opaque modules in which a cross-entropy is called
