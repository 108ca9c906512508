"""Values of a batch that are not cut into micro-batches: `sl.Uncut`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl


class Masked(nn.Module):
    """Attention with a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return x


@torch.no_grad()
def in_parts(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([model(part, mask) for part in torch.split(x, 2)])


def causal(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


def pipeline(model: Any, example: Any = None, **more: Any) -> sl.Pipeline:
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "example_inputs": example}
    return sl.Pipeline(model, mse_loss, **sizes | more)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_a_mask_of_the_whole_batch_reaches_every_micro_batch(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(8, 5, 8)
    batch = {"x": x, "mask": sl.Uncut(causal(5))}
    with pipeline(model, batch, backend=backend) as pipe:
        pipe.verify(batch, x)
        longer = torch.randn(6, 7, 8)
        pipe.verify({"x": longer, "mask": sl.Uncut(causal(7))}, longer)
        model.eval()
        assert torch.equal(pipe(batch), in_parts(model, x, causal(5)))


def test_a_mask_as_long_as_the_batch_is_not_cut() -> None:
    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(8, 8, 8)
    with pipeline(model, backend="serial") as pipe:
        marked = pipe(x, mask=sl.Uncut(causal(8)))
    assert torch.equal(marked, in_parts(model, x, causal(8)))


def test_without_a_mark_the_error_says_how_to_mark() -> None:
    x = torch.randn(8, 5, 8)
    message = r"dim 0 are 5, 8.*mark tensors.*sl\.Uncut"
    with (
        pipeline(Masked(), backend="serial") as pipe,
        pytest.raises(sl.BatchError, match=message),
    ):
        pipe.step({"x": x, "mask": causal(5)}, x)


class Scale(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


def test_its_gradient_is_the_sum_over_micro_batches() -> None:
    scale = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    x, target = torch.randn(8, 3), torch.randn(8, 3)
    layers = [sl.Layer("linear", nn.Linear(3, 3)), sl.Layer("scale", Scale(), ("x", "scale"))]
    with pipeline(layers, backend="serial") as pipe:
        pipe.step({"x": x, "scale": sl.Uncut(scale * 1.0)}, target)
    linear = layers[0].module
    wanted = torch.autograd.grad(mse_loss(linear(x) * scale, target), scale)[0]
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, wanted)


def test_profiles_and_plans_take_marked_batches() -> None:
    x = torch.randn(8, 5, 8)
    batch = {"x": x, "mask": sl.Uncut(causal(5))}
    profile = sl.profile(Masked(), batch, loss_fn=mse_loss, target=x, repeats=1)
    assert len(profile.names) == 3
    estimated = sl.estimate(Masked(), batch, flops=1e12, bandwidth=1e11)
    assert len(estimated.names) == 3


def test_what_is_marked_may_be_a_container_and_shows_itself() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, table: dict[str, Tensor]) -> Tensor:
            return x + table["row"].sum()

    layers = [sl.Layer("a", nn.Linear(3, 3)), sl.Layer("b", Sum(), ("x", "table"))]
    mark = sl.Uncut({"row": torch.ones(5)})
    assert repr(mark) == "Uncut({'row': tensor([1., 1., 1., 1., 1.])})"
    with pipeline(layers, backend="serial") as pipe:
        pipe.verify({"x": torch.randn(8, 3), "table": mark}, torch.randn(8, 3))
