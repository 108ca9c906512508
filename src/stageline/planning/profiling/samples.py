"""Micro-batches of any size, cut from a sample or made of several of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.arguments import shown
from stageline.errors import PlanError
from stageline.limits import MOST_SAMPLES, check_most
from stageline.runtime import trees
from stageline.runtime.batches import microbatches


def checked_sizes(sizes: Sequence[int] | None, *batches: Any) -> list[int]:
    """In ascending order; by default a quarter, a half and all of the samples that there are.

    >>> checked_sizes(None, torch.ones(8, 2)), checked_sizes([4, 1], torch.ones(8, 2))
    ([2, 4, 8], [1, 4])
    """
    length = microbatches.num_samples(*batches)
    if sizes is None:
        return sorted({max(1, length // share) for share in (4, 2, 1)})
    found = list(sizes) if isinstance(sizes, Sequence) else []
    if not found or not all(type(size) is int and size > 0 for size in found):
        raise PlanError(
            f"sizes is {shown(sizes)}, but has to hold numbers of samples from 1 up, such as "
            "(1, 2, 4)"
        )
    check_most("the largest of sizes", max(found), MOST_SAMPLES, error=PlanError)
    return sorted(set(found))


def resized(batch: Any, samples: int) -> Any:
    """As many samples, in tensors of their own and at the edge of a graph of their own.

    >>> resized((torch.arange(3), "all"), 5)
    (tensor([0, 1, 2, 0, 1]), 'all')
    """
    return trees.map_leaves(lambda item: trees.as_graph_leaf(_resized(item, samples)), batch)


def _resized(item: Any, samples: int) -> Any:
    if not isinstance(item, Tensor):
        return item
    if not item.ndim:
        return item.clone()
    times = -(-samples // len(item))
    return torch.cat([item] * times)[:samples].clone() if times > 1 else item[:samples].clone()
