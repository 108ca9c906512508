"""What passes between layers: a tensor mostly, or a tree of tuples, lists and dicts around several.

A lone tensor takes a short way: a walk through torch's pytree costs as much as a small operator.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.errors import ModelError

PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with other leaves, in containers of its own."""
    return function(tree) if isinstance(tree, Tensor) else pytree.tree_map(function, tree)


def tensors(tree: Any) -> list[Tensor]:
    """In the order of the tree."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def at_the_edge(item: Any) -> Any:
    """The same tensor at the edge of a graph of its own; what is no tensor, as it is."""
    if isinstance(item, Tensor):
        return item.detach().requires_grad_(item.requires_grad)
    if item is not None and not isinstance(item, PLAIN):
        raise ModelError(
            f"a {type(item).__name__} passes between stages, but tensors in it would not be seen: "
            "pass tensors, numbers, text, and tuples, lists and dicts of them"
        )
    return item


def copied(item: Any) -> Any:
    """A tensor with memory of its own."""
    return item.clone() if isinstance(item, Tensor) else item


def itself(item: Any) -> Any:
    """For a tree of the same things in containers of its own."""
    return item
