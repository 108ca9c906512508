"""Make micro-batches of any size from an example batch, by slicing or repeating it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.arguments import shown
from stageline.errors import PlanError
from stageline.limits import MOST_SAMPLES, check_most
from stageline.model import trees
from stageline.model.uncut import Uncut
from stageline.runtime.batches import microbatches


def microbatch_sizes(sizes: Sequence[int] | None, *batches: Any) -> list[int]:
    """Return sizes in ascending order; by default a quarter, a half and all of the batches.

    >>> microbatch_sizes(None, torch.ones(8, 2)), microbatch_sizes([4, 1], torch.ones(8, 2))
    ([2, 4, 8], [1, 4])
    """
    num_samples = microbatches.num_samples(*batches)
    if sizes is None:
        return sorted({max(1, num_samples // divisor) for divisor in (4, 2, 1)})
    given = list(sizes) if isinstance(sizes, Sequence) else []
    if not given or not all(type(size) is int and size > 0 for size in given):
        raise PlanError(
            f"sizes is {shown(sizes)}, but has to be a list of numbers of samples, each at least "
            "1, such as (1, 2, 4)"
        )
    check_most("the largest of sizes", max(given), MOST_SAMPLES, error=PlanError)
    return sorted(set(given))


def resize_batch(batch: Any, num_samples: int) -> Any:
    """Return a copy of a batch with this many samples, detached from any autograd graph.

    >>> resize_batch((torch.arange(3), "all"), 5)
    (tensor([0, 1, 2, 0, 1]), 'all')
    """
    return trees.map_leaves(lambda item: trees.as_graph_leaf(_resize(item, num_samples)), batch)


def _resize(item: Any, num_samples: int) -> Any:
    if isinstance(item, Uncut):
        return item.value.clone() if isinstance(item.value, Tensor) else item.value
    if not isinstance(item, Tensor):
        return item
    if not item.ndim:
        return item.clone()
    repeats = -(-num_samples // len(item))
    if repeats == 1:
        return item[:num_samples].clone()
    return torch.cat([item] * repeats)[:num_samples].clone()
