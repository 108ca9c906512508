"""Running statistics of BatchNorm are updated once per mini-batch, however it is cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError
from stageline.options import Options
from stageline.pipeline import Pipeline


def model(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(2)
    first = nn.BatchNorm1d(4, momentum=momentum)
    middle = (nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(first, *middle, nn.Linear(12, 2))


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(length, 4, 3) * 3 + 1, torch.randn(length, 2)


@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_the_first_layer_has_the_statistics_of_an_uncut_batch(
    num_microbatches: int, momentum: float | None, recompute: str
) -> None:
    """The first BatchNorm's input does not depend on the cut: a plain one is the reference."""
    ours = model(momentum)
    plain = copy.deepcopy(ours[0])
    pipe = Pipeline(
        ours,
        mse_loss,
        num_ranks=2,
        num_microbatches=num_microbatches,
        schedule="zb_h1",
        recompute=recompute,
    )
    for length in (7, 10, 8):
        x, target = batch(length)
        pipe.step(x, target)
        plain(x)
    pipe.close()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(ours[0].state_dict()[name], tensor)  # other order of sums


def test_statistics_do_not_depend_on_ranks_backend_or_recomputation() -> None:
    states = []
    for num_ranks, backend, recompute in (
        (1, "serial", "never"),
        (2, "threads", "never"),
        (3, "threads", "always"),
        (5, "serial", "except_last"),
    ):
        ours = model()
        pipe = Pipeline(
            ours,
            mse_loss,
            num_ranks=num_ranks,
            num_microbatches=3,
            backend=backend,
            recompute=recompute,
        )
        torch.manual_seed(5)
        for _ in range(3):
            pipe.step(*batch(8))
        pipe.close()
        states.append(ours.state_dict())
    for state in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(state[name], tensor), name


def test_a_short_batch_does_not_affect_the_next() -> None:
    """torchgpipe keeps the moments of so small a batch for the next one."""
    ours = model()
    pipe = Pipeline(
        ours, mse_loss, num_ranks=2, num_microbatches=4, options=Options(batch_norm="minibatch")
    )
    plain = copy.deepcopy(ours[0])
    for length in (3, 8):
        x, target = batch(length)
        pipe.step(x, target)
        plain(x)
    pipe.close()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(ours[0].state_dict()[name], tensor)


def test_evaluation_mode_is_left_alone() -> None:
    ours = model().eval()
    before = copy.deepcopy(ours.state_dict())
    pipe = Pipeline(ours, mse_loss, num_ranks=2, num_microbatches=2)
    pipe.step(*batch(4))
    pipe.close()
    for name, tensor in before.items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_another_mode_is_refused() -> None:
    with pytest.raises(ModelError, match="batch_norm is 'batch', but takes 'minibatch' or"):
        Pipeline(
            model(), mse_loss, num_ranks=1, num_microbatches=1, options=Options(batch_norm="batch")
        )
