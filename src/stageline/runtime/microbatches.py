"""Cut a mini-batch into micro-batches, as evenly as possible, without losing a sample."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from stageline.errors import BatchError


def sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """They differ by one at most, larger ones first; a small batch makes fewer micro-batches.

    >>> sizes(10, 4), sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    each, more = divmod(num_samples, num_microbatches)
    return [each + (i < more) for i in range(min(num_samples, num_microbatches))]


def num_samples(*batches: Any) -> int:
    """The common length of all tensors along dim 0."""
    tensors = [leaf for leaf in pytree.tree_leaves(batches) if isinstance(leaf, torch.Tensor)]
    lengths = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "none"
        raise BatchError(
            f"lengths along dim 0 are {found}, but inputs and target are cut there together and "
            "need one length: pass what is no batch as a number, or from the model"
        )
    if not (length := lengths.pop()):
        raise BatchError("the batch has no samples, but a step needs one at least")
    return length


def cut(batch: Any, pieces: list[int]) -> list[Any]:
    """The pieces of a pytree; what is no tensor, or has no dimension, is in every piece."""
    leaves, form = pytree.tree_flatten(batch)
    columns = [
        torch.split(leaf, pieces)
        if isinstance(leaf, torch.Tensor) and leaf.ndim
        else (leaf,) * len(pieces)
        for leaf in leaves
    ]
    rows = zip(*columns, strict=True) if columns else [()] * len(pieces)
    return [pytree.tree_unflatten(list(row), form) for row in rows]


def join(pieces: list[Any]) -> Any:
    """One pytree again; what is no tensor is taken from the first piece."""
    leaves = pytree.tree_leaves(pieces)
    if any(isinstance(leaf, torch.Tensor) and not leaf.ndim for leaf in leaves):
        raise BatchError(
            "the output has a tensor without dimensions, but outputs of micro-batches are joined "
            "along dim 0: return one value for each sample"
        )
    columns = zip(*(pytree.tree_leaves(piece) for piece in pieces), strict=True)
    form = pytree.tree_structure(pieces[0])
    joined = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0]
        for column in columns
    ]
    return pytree.tree_unflatten(joined, form)


def pair(item: Any) -> tuple[Any, Any]:
    """What a loader gives, taken apart."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise BatchError(
        f"the loader gave a {type(item).__name__}, but a batch is a pair (inputs, target): several "
        "inputs go in a dict or a tuple of their own"
    )
