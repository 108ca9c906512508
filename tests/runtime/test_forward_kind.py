"""What a layer is told of the forward that it runs in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.runtime.stage.forward_kind import ForwardKind, running_forward


class Noting(nn.Linear):
    """Notes the kinds of the forwards that it runs in."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.kinds = Kinds()

    def forward(self, x: Tensor) -> Tensor:
        self.kinds.seen.append(running_forward())
        return super().forward(x)


class Kinds:
    """A list that recomputation does not put back, since it is no plain attribute."""

    def __init__(self) -> None:
        self.seen: list[ForwardKind | None] = []


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_a_forward_is_the_only_the_first_or_another_one_and_outside_there_is_none(
    backend: str,
) -> None:
    once, twice = Noting(), Noting()
    x = torch.ones(2, 2)
    with sl.Pipeline(
        nn.Sequential(once, twice),
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=1,
        recompute=["never", "always"],
        backend=backend,
    ) as pipe:
        pipe.step(x, x)
        assert running_forward() is None
    assert once.kinds.seen == [ForwardKind.ONLY]
    assert twice.kinds.seen == [ForwardKind.FIRST, ForwardKind.AGAIN]
    assert running_forward() is None
