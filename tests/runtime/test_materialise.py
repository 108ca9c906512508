"""Models built on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError
from stageline.model.layers import Layer
from stageline.pipeline import Pipeline


class Head(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        first = nn.Linear(4, 4)
        return nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 4))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_the_same_however_the_model_is_cut(num_ranks: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, several = on_meta(), on_meta()
    Pipeline(one, mse_loss, num_ranks=1, num_microbatches=2, seed=7).close()
    pipe = Pipeline(several, mse_loss, num_ranks=num_ranks, num_microbatches=2, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.state_dict().values(), several.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    pipe.verify(torch.randn(4, 4), torch.randn(4, 4))
    pipe.close()


def test_a_function_of_the_user_s_own_fills_a_layer() -> None:
    def fill(layer: Layer) -> None:
        for tensor in layer.module.parameters():
            nn.init.constant_(tensor, float(layer.name) + 1)

    with torch.device("meta"):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    Pipeline([first, second], mse_loss, num_ranks=2, num_microbatches=1, init=fill).close()
    assert torch.equal(first.weight, torch.ones(2, 2))
    assert torch.equal(second.bias, torch.full((2,), 2.0))


def test_a_weight_that_layers_share_stays_one() -> None:
    with torch.device("meta"):
        linear = nn.Linear(4, 4, bias=False)
        head = Head(linear)
    pipe = Pipeline(
        [linear, nn.Tanh(), head],
        mse_loss,
        num_ranks=3,
        num_microbatches=1,
        init=lambda layer: nn.init.eye_(next(layer.module.parameters())),
    )
    assert linear.weight is head.weight
    assert len(list(pipe.parameters())) == 1
    pipe.close()


def test_a_module_that_cannot_fill_itself_is_named() -> None:
    with torch.device("meta"):
        linear = nn.Linear(4, 4, bias=False)
        head = Head(linear)
    with pytest.raises(ModelError, match=r"^'1', a Head, is on the meta device and has no reset_p"):
        Pipeline([nn.Linear(4, 4), head], mse_loss, num_ranks=2, num_microbatches=1)
