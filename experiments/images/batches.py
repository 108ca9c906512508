"""Batches of augmented images: random horizontal flips, cutout, and subsets of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from experiments.images.data import Images


@dataclass(frozen=True)
class Batches:
    """A loader for `sl.fit`, which seeds torch before each epoch.

    Every epoch takes one number from torch and draws all others from a generator of its own, so
    that nothing that happens between two batches changes them.
    """

    images: Images
    size: int
    flips: bool
    cutout: int  # pixels of the square's side

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        for indices in epoch(len(self.images.labels), self.size, draws):
            pixels, labels = self.images.at(indices)
            if self.flips:
                pixels = flip(pixels, draws)
            yield cut_out(pixels, self.cutout, draws), labels


def epoch(num_images: int, size: int, draws: Generator) -> Iterator[Tensor]:
    """Yield the indices of full batches; few images are repeated until they fill one.

    >>> [len(each) for each in epoch(10, 4, torch.Generator())]
    [4, 4]
    >>> [sorted(each.tolist()) for each in epoch(2, 4, torch.Generator())]
    [[0, 0, 1, 1]]
    """
    passes = -(-size // num_images)
    order = torch.cat([torch.randperm(num_images, generator=draws) for _ in range(passes)])
    yield from order[: len(order) // size * size].view(-1, size)


def flip(pixels: Tensor, draws: Generator) -> Tensor:
    """Mirror each image with a probability of one half."""
    is_flipped = torch.rand(len(pixels), 1, 1, 1, generator=draws) < 0.5
    return torch.where(is_flipped, pixels.flip(-1), pixels)


def cut_out(pixels: Tensor, side: int, draws: Generator) -> Tensor:
    """Set a square of each image to the mean, 0; the part of it beyond the border is lost.

    Its centre is any pixel (DeVries and Taylor, arXiv 1708.04552).
    """
    number, _, height, width = pixels.shape
    rows = _is_inside(height, torch.randint(height, (number,), generator=draws), side)
    columns = _is_inside(width, torch.randint(width, (number,), generator=draws), side)
    return pixels.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def _is_inside(length: int, centres: Tensor, side: int) -> Tensor:
    first = centres[:, None] - side // 2
    places = torch.arange(length)
    return (places >= first) & (places < first + side)


def subset(images: Images, share: float, seed: int) -> Images:
    """Return a share of the images of each class, at least one of each."""
    draws = torch.Generator().manual_seed(seed)
    chosen = []
    for label in sorted(set(images.labels.tolist())):
        of_class = (images.labels == label).nonzero().flatten()
        order = torch.randperm(len(of_class), generator=draws)
        chosen.append(of_class[order[: max(1, round(share * len(of_class)))]])
    return images.at(torch.cat(chosen))
