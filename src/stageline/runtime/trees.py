"""What passes between layers: a tensor mostly, or a tree of containers around several.

A container is whatever torch's pytree has registered; beside these a dataclass, a mapping, or a
subclass of tuple, list or dict, as long as everything an instance holds is in its items and its
attributes, so that another one can be made that is equal. Other objects are leaves, and so is None.

A lone tensor takes a short way: a walk through a tree costs as much as a small operator.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property
from types import FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.errors import ModelError

PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout)

# Their items are all that they hold, and they are made again by a call.
SEQUENCES = (tuple, list, torch.Size)
MAPPINGS = (dict, MappingProxyType)

# What a class may inherit from, if it is written in Python otherwise: where its items are.
BASES = (defaultdict, OrderedDict, dict, list, tuple, object)


@dataclass(frozen=True, slots=True)
class Spec:
    """A tree without its leaves. It is hashable unless a registered class gives it a list.

    `type` is that of the container, or None for a leaf. `context` is what the container has beside
    its children: None for a sequence, the keys of a mapping, what its own function for torch's
    pytree gave for a registered class, and for all others (keys, attributes, slots, shared
    attributes, default factory), which are tuples of names but for the last.
    """

    type: builtins.type[Any] | None = None
    context: Any = None
    children: tuple[Spec, ...] = ()


LEAF = Spec()


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Return the leaves of a tree in its order, and the tree without them."""
    leaves: list[Any] = []
    try:
        return leaves, _flatten(tree, leaves)
    except RecursionError:
        raise ModelError(
            f"a {type(tree).__name__} contains itself, or is nested too deep, but it has to be a "
            "tree to be taken apart: pass its tensors in a tuple or a dict"
        ) from None


def unflatten(leaves: Iterable[Any], spec: Spec) -> Any:
    """Return the tree of `spec` around other leaves, in containers of its own.

    >>> leaves, spec = flatten({"b": (1, None), "a": [2]})
    >>> leaves
    [1, None, 2]
    >>> unflatten("xyz", spec)
    {'b': ('x', 'y'), 'a': ['z']}
    """
    rest = iter(leaves)
    tree = _unflatten(rest, spec)
    if any(True for _ in rest):
        raise ValueError("there are more leaves than places in the tree")
    return tree


def paths(spec: Spec) -> list[str]:
    """Return the place of each leaf, as one would write it behind the tree's name.

    >>> paths(flatten({"logits": 1, "hidden": (2, 3)})[1])
    ["['logits']", "['hidden'][0]", "['hidden'][1]"]
    """
    if spec.type is None:
        return [""]
    pairs = zip(names(spec), spec.children, strict=True)
    return [name + path for name, child in pairs for path in paths(child)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with other leaves, in containers of its own."""
    if isinstance(tree, Tensor):
        return function(tree)
    leaves, spec = flatten(tree)
    return unflatten(map(function, leaves), spec)


def tensors(tree: Any) -> list[Tensor]:
    """In the order of the tree."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf is an object with tensors or arrays in it, which nobody would see there."""
    if leaf is None or isinstance(leaf, (Tensor, *PLAIN)):
        return False
    return any(True for _ in inside(leaf))


def inside(item: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of any object, as far as its items and attributes lead.

    A module is not asked: its weights are its own.
    """
    seen: dict[int, Any] = {}
    waiting = [item]
    while waiting:
        found = waiting.pop()
        is_array = hasattr(found, "__array__") and bool(getattr(found, "ndim", False))
        is_deep = not isinstance(found, (*PLAIN, type, ModuleType, FunctionType, nn.Module))
        if isinstance(found, Tensor) or (is_array and is_deep):
            yield found
        elif is_deep and id(found) not in seen:
            seen[id(found)] = found
            waiting += _held(found)


def _held(item: Any) -> list[Any]:
    """Return what an object has as items and attributes, as far as they can be seen."""
    if isinstance(item, tuple | list | set | frozenset | deque):
        found = list(item)
    elif isinstance(item, Mapping):
        found = list(item.values())
    else:
        found = []
    state = object.__getstate__(item)
    for part in state if isinstance(state, tuple) else (state,):
        found += list(part.values()) if isinstance(part, dict) else []
    return found


def at_the_edge(item: Any) -> Any:
    """The same tensor at the edge of a graph of its own; what is no tensor, as it is."""
    if isinstance(item, Tensor):
        return item.detach().requires_grad_(item.requires_grad)
    if item is not None and not isinstance(item, PLAIN):
        raise ModelError(
            f"a {type(item).__name__} passes between stages, but tensors in it would not be seen: "
            "pass tensors, numbers, text, and tuples, lists, dicts and dataclasses of them"
        )
    return item


def without_graph(item: Any) -> Any:
    """Return the same tensor outside of any graph."""
    return item.detach() if isinstance(item, Tensor) else item


def copied(item: Any) -> Any:
    """A tensor with memory of its own."""
    return item.clone() if isinstance(item, Tensor) else item


def itself(item: Any) -> Any:
    """For a tree of the same things in containers of its own."""
    return item


def _flatten(node: Any, leaves: list[Any]) -> Spec:
    kind = type(node)
    if node is None or isinstance(node, Tensor):
        leaves.append(node)
        return LEAF
    context: Any = None
    if kind in SEQUENCES:
        children = node
    elif kind in MAPPINGS:
        context, children = tuple(node), node.values()
    elif isinstance(node, PLAIN) or not (opened := _opened(node)):
        leaves.append(node)
        return LEAF
    else:
        context, children = opened
    return Spec(kind, context, tuple([_flatten(child, leaves) for child in children]))


def _opened(node: Any) -> tuple[Any, Iterable[Any]] | None:
    """Return the context and the children of a container of another class; None for a leaf."""
    if registered := _registered(type(node)):
        children, context = registered.flatten_fn(node)
        return context, children
    return _taken_apart(node) if _is_container(node) else None


def _registered(kind: type[Any]) -> pytree.NodeDef | None:
    """Return how torch takes a class apart, but for those of which we know as much."""
    is_ours = kind in BASES or pytree.is_namedtuple_class(kind)
    return None if is_ours else pytree.SUPPORTED_NODES.get(kind)


def _is_container(node: Any) -> bool:
    if isinstance(node, nn.Module):
        return False
    is_known = is_dataclass(node) or isinstance(node, tuple | list | Mapping)
    return is_known and _has_nothing_hidden(type(node))


def _has_nothing_hidden(kind: type[Any]) -> bool:
    """Whether an instance is no larger than its items, attributes and slots need.

    What a class written in C holds beside them would be lost.
    """
    base = _base(kind)
    own = kind.__mro__[: kind.__mro__.index(base)]
    slots = sum(type(each) is MemberDescriptorType for c in own for each in vars(c).values())
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if base is tuple:  # the items come last, so the place of the attributes counts from the end
        pointers += kind.__dictoffset__ < 0
    return kind.__basicsize__ <= base.__basicsize__ + pointers * tuple.__itemsize__


def _base(kind: type[Any]) -> type[Any]:
    """Return where the items of a class are; `object` if it has none but attributes."""
    return next(each for each in kind.__mro__ if each in BASES)


def _taken_apart(node: Any) -> tuple[Any, list[Any]]:
    """Return what `_put_together` needs, in the order of dataclass fields where there are any."""
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
    """The fields of a dataclass come first, whenever they were set; what is cached is left out."""
    declared = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    names = dict.fromkeys((*(name for name in declared if name in found), *found))
    return [name for name in names if not isinstance(_on_class(kind, name), cached_property)]


def _on_class(kind: type[Any], name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _unflatten(leaves: Iterator[Any], spec: Spec) -> Any:
    kind = spec.type
    if kind is None:
        try:
            return next(leaves)
        except StopIteration:
            raise ValueError("there are fewer leaves than places in the tree") from None
    children = [_unflatten(leaves, child) for child in spec.children]
    if kind in SEQUENCES:
        return children if kind is list else kind(children)
    if kind in MAPPINGS:
        made = dict(zip(spec.context, children, strict=True))
        return made if kind is dict else kind(made)
    if registered := _registered(kind):
        return registered.unflatten_fn(children, spec.context)
    return _put_together(kind, spec.context, children)


def _put_together(kind: type[Any], context: Any, children: list[Any]) -> Any:
    """Make an instance by what it holds: its `__init__` may compute, or refuse, other things."""
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


def names(spec: Spec) -> list[str]:
    """Return how one writes each child of a container behind the container's name."""
    kind, context, number = spec.type, spec.context, len(spec.children)
    assert kind is not None  # it is not a leaf
    if kind in MAPPINGS:
        return [f"[{key!r}]" for key in context]
    if kind in SEQUENCES:
        return [f"[{i}]" for i in range(number)]
    if _registered(kind):
        return _names_of_registered(context, number)
    keys, attributes, slots, *_ = context
    named = [f".{name}" for name in (*attributes, *slots)]
    if pytree.is_namedtuple_class(kind):
        return [*(f".{name}" for name in kind._fields), *named]
    return [*(f"[{key!r}]" for key in keys or range(number - len(named))), *named]


def _names_of_registered(context: Any, number: int) -> list[str]:
    """Its context is its own affair; mostly it has the names, or a list of them comes first."""
    first = context[0] if isinstance(context, list | tuple) and context else None
    for found in (context, first):
        names = [n for n in found if isinstance(n, str)] if isinstance(found, list | tuple) else []
        if names and len(names) == number:
            return [f".{name}" for name in names]
    return [f"[{i}]" for i in range(number)]
