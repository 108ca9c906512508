"""One model of the table, with batches to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Any, Any]  # inputs and target; the target is None if the model has its own loss
Batches = Callable[[int, int], Batch]


@dataclass(frozen=True)
class Case:
    """A model, and a function from a number of samples and a size to a batch.

    The size is the length of sequences, or a multiple of the side of images; 0 is the first one.
    """

    model: nn.Module
    batch: Batches
    loss_fn: Callable[[Any, Any], Tensor] | None = None


Maker = Callable[[], Case]


def tokens(num_samples: int, length: int, vocabulary: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(num_samples * 1000 + length)
    return torch.randint(3, vocabulary, (num_samples, length), generator=generator)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def classes(num_samples: int) -> Tensor:
    return tokens(num_samples, 1)[:, 0] % 5


def language_model(num_samples: int, size: int) -> Batch:
    """Return tokens with padding at the end, which the labels leave out."""
    ids = tokens(num_samples, 10 + 4 * size)
    mask = torch.ones_like(ids)
    mask[::3, -2:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }, None


def unpadded(num_samples: int, size: int) -> Batch:
    ids = tokens(num_samples, 10 + 4 * size)
    return {"input_ids": ids, "labels": ids}, None


def sequence_to_sequence(num_samples: int, size: int) -> Batch:
    ids, labels = tokens(num_samples, 10 + 4 * size), tokens(num_samples, 7 + size)
    mask = torch.ones_like(ids)
    mask[1::2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, None


def labelled_images(num_samples: int, _: int) -> Batch:
    return {"pixel_values": noise(num_samples, 3, 32, 32), "labels": classes(num_samples)}, None


def images(side: int, step: int = 0) -> Batches:
    """Return batches of images and classes, for a loss outside of the model."""

    def batch(num_samples: int, size: int) -> Batch:
        pixels = noise(num_samples, 3, side + step * size, side + step * size)
        return pixels, classes(num_samples)

    return batch
