"""Mark a value of a batch that is not cut into micro-batches."""

from __future__ import annotations

from typing import Any

from stageline.model import trees


class Uncut:
    """A value that every micro-batch gets as it is, such as a mask of length × length.

    Other tensors of a batch have one row for each sample, and are cut along dim 0.

    >>> import torch
    >>> batch = {"x": torch.ones(8, 5, 4), "mask": Uncut(torch.ones(5, 5).tril())}
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Uncut({self.value!r})"


def unmarked(tree: Any) -> Any:
    """Return a tree with the values themselves in place of marks."""
    return trees.map_leaves(lambda leaf: leaf.value if isinstance(leaf, Uncut) else leaf, tree)
