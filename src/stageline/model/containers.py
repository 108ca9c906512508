"""Take containers of any class apart, and make equal ones again around other children.

A container is an instance of a class that torch's pytree has registered; besides those a dataclass,
a mapping, or a subclass of tuple, list or dict, as long as everything an instance holds is in its
items and its attributes, so that an equal one can be made. All other objects are leaves.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from types import MemberDescriptorType
from typing import Any

from torch import nn

from stageline.torch_private import pytree

# Classes that hold items. Other classes in Python may inherit from them.
BASES = (defaultdict, OrderedDict, dict, list, tuple, object)


def take_apart(node: Any) -> tuple[Any, Iterable[Any]] | None:
    """Return the context and the children of a container of another class; None for a leaf."""
    if registered := registered_class(type(node)):
        children, context = registered.flatten_fn(node)
        return context, children
    return _parts(node) if _is_container(node) else None


def registered_class(kind: type[Any]) -> pytree.NodeDef | None:
    """Return how torch's pytree takes a class apart; None for classes that we handle ourselves."""
    is_ours = kind in BASES or pytree.is_namedtuple_class(kind)
    return None if is_ours else pytree.SUPPORTED_NODES.get(kind)


def _is_container(node: Any) -> bool:
    if isinstance(node, nn.Module):
        return False
    is_known = is_dataclass(node) or isinstance(node, tuple | list | Mapping)
    return is_known and _holds_nothing_else(type(node))


def _holds_nothing_else(kind: type[Any]) -> bool:
    """Return whether an instance is no larger than its items, attributes and slots need.

    What a class written in C holds besides them would be lost.
    """
    base = _base(kind)
    own = kind.__mro__[: kind.__mro__.index(base)]
    slots = sum(type(each) is MemberDescriptorType for c in own for each in vars(c).values())
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if base is tuple:  # the items come last, so the place of the attributes counts from the end
        pointers += kind.__dictoffset__ < 0
    return kind.__basicsize__ <= base.__basicsize__ + pointers * tuple.__itemsize__


def _base(kind: type[Any]) -> type[Any]:
    """Return the class that holds the items; `object` if there are only attributes."""
    return next(each for each in kind.__mro__ if each in BASES)


def _parts(node: Any) -> tuple[Any, list[Any]]:
    """Return what `_from_parts` needs; dataclass fields in their order."""
    kind = type(node)
    base = _base(kind)
    keys: tuple[Any, ...] = ()
    if issubclass(base, dict):
        items = dict(base.items(node))
        keys = tuple(items)
        children = list(items.values())
    else:
        items = {}
        children = list(base.__iter__(node)) if base is not object else []
    state: Any = object.__getstate__(node)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    parts: list[tuple[str, ...]] = []
    shared = []
    for found in (attributes or {}, slots or {}):
        kept = []
        for name in _ordered(kind, found):
            if name in items and items[name] is found[name]:
                shared.append(name)
            else:
                kept.append(name)
                children.append(found[name])
        parts.append(tuple(kept))
    factory = node.default_factory if base is defaultdict else None
    return (keys, *parts, tuple(shared), factory), children


def _ordered(kind: type[Any], found: Mapping[str, Any]) -> list[str]:
    """Return attribute names, dataclass fields first, without cached properties."""
    declared = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    names = dict.fromkeys((*(name for name in declared if name in found), *found))
    return [name for name in names if not isinstance(_on_class(kind, name), cached_property)]


def _on_class(kind: type[Any], name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def put_together(kind: type[Any], context: Any, children: list[Any]) -> Any:
    """Return a container of a class from its context and its children."""
    if registered := registered_class(kind):
        return registered.unflatten_fn(children, context)
    return _from_parts(kind, context, children)


def _from_parts(kind: type[Any], context: Any, children: list[Any]) -> Any:
    """Make an instance without its `__init__`, which may compute or refuse other things."""
    keys, attributes, slots, shared, factory = context
    base: Any = _base(kind)
    num_items = len(children) - len(attributes) - len(slots)
    items = children[:num_items]
    made = base.__new__(kind, items) if base is tuple else base.__new__(kind)
    if base is list:
        list.extend(made, items)
    for key, value in zip(keys, items, strict=False):
        base.__setitem__(made, key, value)
    if base is defaultdict:
        made.default_factory = factory
    values = iter(children[num_items:])
    by_name = {name: next(values) for name in attributes}
    for name in slots:
        object.__setattr__(made, name, next(values))
    for name in shared:
        by_name[name] = base.__getitem__(made, name)
    if by_name:
        made.__dict__.update(by_name)
    return made
