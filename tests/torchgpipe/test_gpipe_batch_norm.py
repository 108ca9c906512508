"""Deferred BatchNorm: running statistics of whole mini-batches, in a `GPipe` or in a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline import Pipeline
from stageline.torchgpipe import GPipe
from stageline.torchgpipe.batchnorm import DeferredBatchNorm

MODES = ("always", "except_last", "never")


def deferred(norm: nn.Module, chunks: int) -> nn.Module:
    return DeferredBatchNorm.convert_deferred_batch_norm(norm, chunks)


def assert_same_statistics(found: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", MODES)
def test_statistics_are_those_of_the_whole_batch(checkpoint: str, momentum: float | None) -> None:
    plain = nn.BatchNorm2d(3, momentum=momentum)
    module = nn.Sequential(copy.deepcopy(plain))
    model = GPipe(
        module, [1], devices=["cpu"], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True
    )
    for length in (8, 3, 8):  # of the second, torchgpipe keeps the moments for the third
        x = torch.rand(length, 3, 5, 5) * 10
        model(x).sum().backward()
        plain(x)
    assert_same_statistics(model[0], plain)


def test_a_plain_loop_is_a_mini_batch_every_few_calls() -> None:
    plain = nn.BatchNorm1d(3)
    norm = deferred(copy.deepcopy(plain), chunks=2)
    for _ in range(2):
        x = torch.rand(8, 3)
        outputs = [norm(part) for part in x.chunk(2)]
        for part, output in zip(x.chunk(2), outputs, strict=True):
            assert torch.equal(output, copy.deepcopy(plain)(part))
        plain(x)
    assert_same_statistics(norm, plain)
    torch.testing.assert_close(norm.eval()(x), plain.eval()(x))


def test_only_norms_that_track_statistics_are_converted() -> None:
    untracked = nn.BatchNorm2d(3, track_running_stats=False)
    assert deferred(untracked, chunks=2) is untracked
    norm = DeferredBatchNorm(3, chunks=2)
    assert deferred(norm, chunks=2) is norm
    assert deferred(norm, chunks=3) is not norm


def test_converted_norms_keep_their_parameters_and_mode() -> None:
    norm, block = nn.BatchNorm2d(3).eval(), nn.Sequential()
    block.extend([nn.Conv2d(3, 3, 1), norm])
    module = nn.Sequential(block, nn.BatchNorm2d(3, affine=False))
    assert deferred(module, chunks=2) is module
    new = block[1]
    assert isinstance(new, DeferredBatchNorm)
    assert new.weight is norm.weight
    assert not new.training
    assert [*new.state_dict()] == [
        *("weight", "bias", "running_mean", "running_var"),
        *("num_batches_tracked", "sum", "sum_squares"),
    ]


def test_a_norm_in_two_places_stays_one_norm() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    module = Twice()
    deferred(module, chunks=2)
    assert isinstance(module.first, DeferredBatchNorm)
    assert module.first is module.second


def test_frozen_norms_are_left_alone() -> None:
    model = GPipe(
        nn.Sequential(nn.BatchNorm1d(3)), [1], devices=["cpu"], chunks=2, deferred_batch_norm=True
    )
    model[0].eval()
    before = copy.deepcopy(model.state_dict())
    model(torch.rand(4, 3)).sum().backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_deferred_norms_are_exact_in_any_pipeline() -> None:
    module = nn.Sequential(nn.Linear(3, 3), DeferredBatchNorm(3, chunks=4), nn.Linear(3, 1))
    x = torch.rand(8, 3)
    with Pipeline(
        module, nn.functional.mse_loss, num_ranks=2, num_microbatches=4, example_inputs=x
    ) as pipe:
        pipe.verify(x, torch.rand(8, 1))
    assert int(module.state_dict()["1.num_batches_tracked"]) == 0  # verify leaves it as it was
