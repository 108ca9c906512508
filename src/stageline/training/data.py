"""Batches in an order that depends only on the seed and the epoch, so that runs can be resumed.

Before each epoch torch's generator is seeded and the sampler's `set_epoch` is called: a loader that
shuffles has the same order on every rank, and again after a restart. A resumed run reads the
batches of the current epoch from its start and skips those that it has trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import torch

from stageline.errors import BatchError
from stageline.runtime.batches.microbatches import pair


class DataPosition(NamedTuple):
    """The number of complete epochs, and of batches in the current one."""

    epoch: int = 0
    batch: int = 0


class Batch(NamedTuple):
    """One batch of the loader."""

    inputs: Any
    target: Any
    after: DataPosition  # the position once this batch is trained on


def batches(
    loader: Iterable[Any], seed: int, start: DataPosition, *, has_own_loss: bool
) -> Iterator[Batch]:
    """Yield batches without end; raise `BatchError` if the loader yields none in an epoch."""
    for epoch in count(start.epoch):
        torch.manual_seed(_epoch_seed(seed, epoch))
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        skip = start.batch if epoch == start.epoch else 0
        number = 0
        for number, item in enumerate(loader, start=1):
            if number > skip:
                inputs, target = pair(item, has_own_loss=has_own_loss)
                yield Batch(inputs, target, DataPosition(epoch, number))
        if not number:
            raise BatchError(
                f"the loader yielded no batch in epoch {epoch}, but more steps are needed: use a "
                "loader that can be iterated again, such as a DataLoader or a list, or fewer steps"
            )


def _epoch_seed(seed: int, epoch: int) -> int:
    digest = blake2b(f"epoch {epoch} of seed {seed}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
