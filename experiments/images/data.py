"""Images that installed packages bring: Fashion-MNIST of Debian, and scikit-learn's digits.

Both become grey images of 14×14 pixels: the paper, too, resizes the images of all its data sets to
one size. Digits of 8×8 pixels are enlarged, and clothes of 28×28 reduced.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where dataset-fashion-mnist puts its files
SIDE = 14  # pixels
NUM_TEST_DIGITS = 400  # of 1,797


class Images(NamedTuple):
    """Grey images with their labels."""

    pixels: Tensor  # number × 1 × side × side
    labels: Tensor

    def at(self, indices: Tensor) -> Images:
        return Images(self.pixels[indices], self.labels[indices])


@dataclass(frozen=True)
class Task:
    """Classes of a data set, and how many of its images are used."""

    data: str
    classes: tuple[int, ...]
    num_train: int
    num_test: int

    @property
    def is_symmetric(self) -> bool:
        """Return whether the mirror image of an image has its class: true for clothes."""
        return self.data == "fashion"


ALL = tuple(range(10))
TASKS = {
    "fashion": Task("fashion", ALL, 6000, 2000),
    # The targets are those that resemble each other: pullover, coat and shirt; and ankle boots.
    "fashion-6": Task("fashion", (0, 1, 3, 5, 7, 8), 6000, 2000),
    "fashion-4": Task("fashion", (2, 4, 6, 9), 2000, 2000),
    "digits": Task("digits", ALL, 1397, NUM_TEST_DIGITS),
    "digits-6": Task("digits", (0, 1, 2, 3, 4, 5), 1397, NUM_TEST_DIGITS),
    "digits-4": Task("digits", (6, 7, 8, 9), 1397, NUM_TEST_DIGITS),
}


def has_fashion() -> bool:
    return (FASHION / "train-images-idx3-ubyte.gz").exists()


@cache
def load(name: str) -> tuple[Images, Images]:
    """Return the images of a task to train on and to test on, standardised by the former."""
    task = TASKS[name]
    both = _read_fashion() if task.data == "fashion" else _read_digits()
    train = _of_classes(both[0], task.classes, task.num_train)
    test = _of_classes(both[1], task.classes, task.num_test)
    mean, deviation = train.pixels.mean(), train.pixels.std()
    return (
        train._replace(pixels=(train.pixels - mean) / deviation),
        test._replace(pixels=(test.pixels - mean) / deviation),
    )


def _of_classes(images: Images, classes: tuple[int, ...], most: int) -> Images:
    """Return the first images of these classes, which are numbered anew."""
    new_labels = torch.full((10,), -1)
    new_labels[list(classes)] = torch.arange(len(classes))
    labels = new_labels[images.labels]
    chosen = (labels >= 0).nonzero().flatten()[:most]
    return Images(images.pixels, labels).at(chosen)


@cache
def _read_digits() -> tuple[Images, Images]:
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    pixels = interpolate(small, size=SIDE, mode="bilinear", align_corners=False)
    images = Images(pixels, torch.tensor(digits.target))
    # The file is sorted by writers, so it is shuffled before it is split.
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return images.at(order[NUM_TEST_DIGITS:]), images.at(order[:NUM_TEST_DIGITS])


@cache
def _read_fashion() -> tuple[Images, Images]:
    if not has_fashion():
        raise FileNotFoundError(
            f"{FASHION} has no Fashion-MNIST: install Debian's package dataset-fashion-mnist, or "
            "use the option --data digits"
        )
    return _read_pair("train"), _read_pair("t10k")


def _read_pair(part: str) -> Images:
    pixels = read_idx(FASHION / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(FASHION / f"{part}-labels-idx1-ubyte.gz")
    return Images(avg_pool2d(pixels[:, None].float() / 255, 2), labels.long())


def read_idx(path: Path) -> Tensor:
    """Return the bytes of an IDX file: a header of big-endian integers, then the values."""
    content = gzip.decompress(path.read_bytes())
    num_dims = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=num_dims, offset=4)
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_dims)
    return torch.tensor(values.reshape(shape.astype(int)))
