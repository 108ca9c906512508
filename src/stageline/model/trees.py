"""Trees of tensors: what passes between layers is a tensor, or containers around several.

`containers.py` says what a container is. Other objects are leaves, and so is None.

A single tensor is handled first: to traverse a tree costs as much as a small operator.
"""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.containers import put_together, registered_class, take_apart
from stageline.torch_private import pytree

PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout)

# Their items are all that they hold, and a call makes an equal one.
SEQUENCES = (tuple, list, torch.Size)
MAPPINGS = (dict, MappingProxyType)


@dataclass(frozen=True, slots=True)
class Spec:
    """The structure of a tree. It is hashable unless a registered class's context is not.

    `type` is the container's class, or None for a leaf. `context` is what the container has besides
    its children: None for a sequence, the keys of a mapping, the context from torch's pytree for a
    registered class, and for all others (keys, attributes, slots, shared attributes, default
    factory), all of them tuples of names except the last.
    """

    type: builtins.type[Any] | None = None
    context: Any = None
    children: tuple[Spec, ...] = ()


LEAF = Spec()


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Return the leaves of a tree in order, and its structure."""
    leaves: list[Any] = []
    try:
        return leaves, _flatten(tree, leaves)
    except RecursionError:
        raise ModelError(
            f"a {type(tree).__name__} contains itself or is nested too deeply, but has to be a "
            "tree: pass its tensors in a tuple or a dict"
        ) from None


def unflatten(leaves: Iterable[Any], spec: Spec) -> Any:
    """Return a tree of structure `spec` with these leaves, in new containers.

    >>> leaves, spec = flatten({"b": (1, None), "a": [2]})
    >>> leaves
    [1, None, 2]
    >>> unflatten("xyz", spec)
    {'b': ('x', 'y'), 'a': ['z']}
    """
    rest = iter(leaves)
    tree = _unflatten(rest, spec)
    if any(True for _ in rest):
        raise ValueError("there are more leaves than the tree has")
    return tree


def paths(spec: Spec) -> list[str]:
    """Return the path of each leaf, as one would write it after the tree's name.

    >>> paths(flatten({"logits": 1, "hidden": (2, 3)})[1])
    ["['logits']", "['hidden'][0]", "['hidden'][1]"]
    """
    if spec.type is None:
        return [""]
    pairs = zip(child_names(spec), spec.children, strict=True)
    return [name + path for name, child in pairs for path in paths(child)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with a function applied to each leaf, in new containers."""
    if isinstance(tree, Tensor):
        return function(tree)
    leaves, spec = flatten(tree)
    return unflatten(map(function, leaves), spec)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def hides_tensors(leaf: Any) -> bool:
    """Return whether a leaf is an object with tensors or arrays in it, which would be missed."""
    if leaf is None or isinstance(leaf, (Tensor, *PLAIN)):
        return False
    return any(True for _ in tensors_inside(leaf))


def tensors_inside(item: Any) -> Iterator[Any]:
    """Yield the tensors and arrays that an object's items and attributes lead to.

    Modules are left out: their weights are handled as weights.
    """
    visited: dict[int, Any] = {}
    pending = [item]
    while pending:
        found = pending.pop()
        is_array = hasattr(found, "__array__") and bool(getattr(found, "ndim", False))
        is_deep = not isinstance(found, (*PLAIN, type, ModuleType, FunctionType, nn.Module))
        if isinstance(found, Tensor) or (is_array and is_deep):
            yield found
        elif is_deep and id(found) not in visited:
            visited[id(found)] = found
            pending += _held(found)


def _held(item: Any) -> list[Any]:
    """Return the items and attributes of an object, as far as Python can list them."""
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


def as_graph_leaf(item: Any) -> Any:
    """Return a tensor as a leaf of a new graph; other items as they are.

    Raise ModelError for objects of other classes, in which tensors would be missed.
    """
    if isinstance(item, Tensor):
        return item.detach().requires_grad_(item.requires_grad)
    if item is not None and not isinstance(item, PLAIN):
        raise ModelError(
            f"a {type(item).__name__} passes between stages, but tensors in it would be missed: "
            "pass tensors, numbers, text, and tuples, lists, dicts and dataclasses of them"
        )
    return item


def detached(item: Any) -> Any:
    """Return a tensor without its graph."""
    return item.detach() if isinstance(item, Tensor) else item


def cloned(item: Any) -> Any:
    """Return a tensor in memory of its own."""
    return item.clone() if isinstance(item, Tensor) else item


def identity(item: Any) -> Any:
    """Return the leaf itself, to make a tree of the same leaves in new containers."""
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
    elif isinstance(node, PLAIN) or not (opened := take_apart(node)):
        leaves.append(node)
        return LEAF
    else:
        context, children = opened
    return Spec(kind, context, tuple([_flatten(child, leaves) for child in children]))


def _unflatten(leaves: Iterator[Any], spec: Spec) -> Any:
    kind = spec.type
    if kind is None:
        try:
            return next(leaves)
        except StopIteration:
            raise ValueError("there are fewer leaves than the tree has") from None
    children = [_unflatten(leaves, child) for child in spec.children]
    if kind in SEQUENCES:
        return children if kind is list else kind(children)
    if kind in MAPPINGS:
        made = dict(zip(spec.context, children, strict=True))
        return made if kind is dict else kind(made)
    return put_together(kind, spec.context, children)


def child_names(spec: Spec) -> list[str]:
    """Return each child of a container as one would write it after the container's name."""
    kind, context, number = spec.type, spec.context, len(spec.children)
    assert kind is not None  # it is not a leaf
    if kind in MAPPINGS:
        return [f"[{key!r}]" for key in context]
    if kind in SEQUENCES:
        return [f"[{i}]" for i in range(number)]
    if registered_class(kind):
        return _names_of_registered(context, number)
    keys, attributes, slots, *_ = context
    named = [f".{name}" for name in (*attributes, *slots)]
    if pytree.is_namedtuple_class(kind):
        return [*(f".{name}" for name in kind._fields), *named]
    return [*(f"[{key!r}]" for key in keys or range(number - len(named))), *named]


def _names_of_registered(context: Any, number: int) -> list[str]:
    """Return names from a registered class's context, which mostly is or begins with them."""
    first = context[0] if isinstance(context, list | tuple) and context else None
    for found in (context, first):
        names = [n for n in found if isinstance(n, str)] if isinstance(found, list | tuple) else []
        if names and len(names) == number:
            return [f".{name}" for name in names]
    return [f"[{i}]" for i in range(number)]
