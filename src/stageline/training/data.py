"""Batches in an order that depends on the seed and the epoch alone, so that a stop changes nothing.

Before each epoch torch's generator is seeded, and a sampler is told the epoch: a loader that
shuffles gives the same order on every rank, and the same again after a restart. Batches that were
trained on before a stop are read once more and passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import torch

from stageline.errors import BatchError
from stageline.runtime.engine.microbatches import pair


class Position(NamedTuple):
    """How far training has come: whole epochs, and batches of the one under way."""

    epoch: int = 0
    batch: int = 0


class Batch(NamedTuple):
    inputs: Any
    target: Any
    after: Position  # where the data stands once it is trained on


def batches(loader: Iterable[Any], seed: int, start: Position) -> Iterator[Batch]:
    """Without end; raises `BatchError` if the loader has nothing (more) to give."""
    for epoch in count(start.epoch):
        torch.manual_seed(_epoch_seed(seed, epoch))
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        skip = start.batch if epoch == start.epoch else 0
        number = 0
        for number, item in enumerate(loader, start=1):
            if number > skip:
                yield Batch(*pair(item), Position(epoch, number))
        if not number:
            raise BatchError(
                f"the loader gave nothing in epoch {epoch}, but more steps are wanted: give one "
                "that can be iterated again, such as a DataLoader or a list, or fewer steps"
            )


def _epoch_seed(seed: int, epoch: int) -> int:
    digest = blake2b(f"epoch {epoch} of seed {seed}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
