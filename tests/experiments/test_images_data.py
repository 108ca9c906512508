"""The images, their batches and the recipe of experiments/images."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from experiments.images.batches import Batches, cut_out, flip, subset
from experiments.images.data import TASKS, Images, has_fashion, load, read_idx
from experiments.images.recipe import Recipe
from torch.nn.functional import cross_entropy


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(num_images: int, num_classes: int = 2) -> Images:
    """Return images whose pixels all have the number of the image, from 1 on."""
    numbers = torch.arange(num_images)
    pixels = (numbers + 1.0)[:, None, None, None].expand(-1, 1, 14, 14)
    return Images(pixels, numbers % num_classes)


def test_digits_are_standardised_and_none_is_in_both_parts() -> None:
    train, test = load("digits")
    assert train.pixels.shape == (1397, 1, 14, 14)
    assert test.pixels.shape == (400, 1, 14, 14)
    assert abs(float(train.pixels.mean())) < 1e-5
    assert abs(float(train.pixels.std()) - 1) < 1e-5
    both = torch.cat([train.pixels, test.pixels]).flatten(1)
    assert len({tuple(image) for image in both.tolist()}) == 1797


def test_source_and_target_share_no_class_and_number_theirs_from_zero() -> None:
    for name in ("fashion", "digits"):
        source, target = TASKS[f"{name}-6"], TASKS[f"{name}-4"]
        assert sorted(source.classes + target.classes) == list(range(10))
    train, _ = load("digits-4")
    sixes = load("digits")[0].pixels[load("digits")[0].labels == 6]
    assert sorted(set(train.labels.tolist())) == [0, 1, 2, 3]
    assert int((train.labels == 0).sum()) == len(sixes)


@pytest.mark.skipif(not has_fashion(), reason="dataset-fashion-mnist is not installed")
def test_fashion_mnist_has_the_images_that_are_asked_for() -> None:
    train, test = load("fashion-4")
    assert train.pixels.shape == (2000, 1, 14, 14)
    assert test.pixels.shape == (2000, 1, 14, 14)
    assert min(train.labels.bincount(minlength=4).tolist()) > 400  # of 500 on average
    assert int(test.labels.max()) == 3


def test_an_idx_file_is_read_in_the_shape_of_its_header(tmp_path: Path) -> None:
    header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (2, 1, 3))
    (tmp_path / "file.gz").write_bytes(gzip.compress(header + bytes(range(6))))
    assert read_idx(tmp_path / "file.gz").tolist() == [[[0, 1, 2]], [[3, 4, 5]]]


def test_cutout_clears_one_square_whose_centre_is_any_pixel() -> None:
    pixels = torch.ones(4000, 1, 6, 6)
    cleared = cut_out(pixels, 3, draws()) == 0
    areas = cleared.sum(dim=(1, 2, 3))
    assert set(areas.tolist()) == {4, 6, 9}  # at corners, at edges, and inside
    # a pixel inside is cleared by 9 centres of 36, one in a corner by 4
    shares = cleared.float().mean(dim=0)[0]
    assert abs(float(shares[2, 2]) - 9 / 36) < 0.03
    assert abs(float(shares[0, 0]) - 4 / 36) < 0.03


def test_about_half_of_the_images_are_mirrored() -> None:
    pixels = torch.arange(3.0).expand(1000, 1, 1, 3)
    mirrored = flip(pixels, draws())[:, 0, 0]
    is_mirrored = mirrored[:, 0] == 2
    assert 420 < int(is_mirrored.sum()) < 580
    assert all(row == [2, 1, 0] for row in mirrored[is_mirrored].tolist())
    assert all(row == [0, 1, 2] for row in mirrored[~is_mirrored].tolist())


def test_an_epoch_has_every_image_once_and_the_same_batches_after_the_same_seed() -> None:
    loader = Batches(numbered(12), size=4, flips=True, cutout=3)
    torch.manual_seed(1)
    first = list(loader)
    assert sorted(float(image.max()) for batch, _ in first for image in batch) == list(range(1, 13))
    torch.manual_seed(1)
    again = []
    for batch in loader:
        torch.rand(3)  # what a training step may draw in between
        again.append(batch)
    for (pixels, labels), (same_pixels, same_labels) in zip(first, again, strict=True):
        assert torch.equal(pixels, same_pixels)
        assert torch.equal(labels, same_labels)


def test_a_subset_has_the_same_share_of_every_class_and_at_least_one_image() -> None:
    images = numbered(1000, num_classes=10)
    assert subset(images, 0.1, seed=0).labels.bincount().tolist() == [10] * 10
    assert subset(images, 0.001, seed=0).labels.bincount().tolist() == [1] * 10
    one, other = (subset(images, 0.1, seed).pixels for seed in (0, 1))
    assert not torch.equal(one, other)


def test_the_learning_rate_rises_in_a_line_and_falls_by_equal_factors() -> None:
    recipe = Recipe(steps=100)
    rates = [recipe.rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    factors = [later / earlier for earlier, later in pairwise(rates[10:])]
    assert factors == pytest.approx([recipe.last_rate ** (1 / 90)] * 90)
    assert rates[-1] == pytest.approx(recipe.last_rate)


def test_the_loss_is_that_of_the_head_and_four_tenths_of_the_auxiliary_one() -> None:
    head, auxiliary = torch.randn(2, 8, 10)
    labels = torch.arange(8)
    uniform = torch.full((10,), 0.1)

    def smoothed(logits: torch.Tensor) -> torch.Tensor:
        truth = torch.eye(10)[labels] * 0.9 + uniform * 0.1
        return cross_entropy(logits, truth)

    found = Recipe(steps=1).loss((head, auxiliary), labels)
    assert found == pytest.approx(float(smoothed(head) + 0.4 * smoothed(auxiliary)), rel=1e-5)
