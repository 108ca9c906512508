"""Balancing by measured times and sizes."""

from __future__ import annotations

import time

import pytest
import torch
from tests.torchgpipe.skip_layers import Pop, Stash
from torch import Tensor, nn

from stageline.torchgpipe.balance import balance_by_size, balance_by_time


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        assert self.training
        time.sleep(self.seconds)
        return x


class Sigmoids(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x.sigmoid()
        return x


def test_the_slowest_partition_is_as_fast_as_possible() -> None:
    model = nn.Sequential(*(Sleep(0.005 * n) for n in (1, 2, 3, 4, 5, 6))).eval()
    assert balance_by_time(2, model, torch.rand(1), timeout=0.1, device="cpu") == [4, 2]
    assert not model.training


@pytest.mark.parametrize(
    ("sizes", "balance"), [((1, 2, 3, 4, 5, 6), [4, 2]), ((6, 5, 4, 3, 2, 1), [2, 4])]
)
def test_the_largest_partition_is_as_small_as_possible(
    sizes: tuple[int, ...], balance: list[int]
) -> None:
    model = nn.Sequential(*map(Sigmoids, sizes))
    sample = torch.rand(8, 100, requires_grad=True)
    assert balance_by_size(2, model, sample, device="cpu") == balance


def test_parameters_count_by_their_scale() -> None:
    """The first layer has 16 KiB of parameters; the others save 8 KiB for each sigmoid."""
    model = nn.Sequential(nn.Linear(512, 8), Sigmoids(1), Sigmoids(1))
    sample = torch.rand(256, 512)
    assert balance_by_size(2, model, sample, param_scale=0, device="cpu") == [2, 1]
    assert balance_by_size(2, model, sample, param_scale=2, device="cpu") == [1, 2]
    assert balance_by_size(2, model, sample, param_scale=0.1, chunks=256, device="cpu") == [1, 2]


def test_models_with_skips_are_measured() -> None:
    model = nn.Sequential(Stash(), nn.Linear(3, 3), Pop())
    assert sum(balance_by_time(2, model, torch.rand(4, 3), timeout=0, device="cpu")) == 3


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    balance_by_time(2, model, torch.rand(4, 3), timeout=0)
    balance_by_size(2, model, torch.rand(4, 3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_with_gradients_and_too_many_partitions_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="2 partitions, but 1 layers"):
        balance_by_time(2, model, torch.rand(4, 3), timeout=0)
    model(torch.rand(4, 3)).sum().backward()
    with pytest.raises(ValueError, match="some parameters have gradients"):
        balance_by_time(1, model, torch.rand(4, 3))
