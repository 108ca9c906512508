"""`pipe(inputs)` in training: a filled pipeline whose output takes any loss of the caller's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import StageError
from stageline.model.layers import Layer, LayerSequence
from stageline.pipeline import Pipeline


def model() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(4, 3))


def mean_of_each(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().sum() / 8


def sum_of_each(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().sum()


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def test_a_loss_outside_gives_the_gradients_of_a_step(
    schedule: str, recompute: str, backend: str
) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    outside, inside = model(), model()
    options = {"num_ranks": 2, "num_microbatches": 4, "backend": backend, "recompute": recompute}
    pipe = Pipeline(outside, mse_loss, schedule=schedule, **options)  # type: ignore[arg-type]
    mean_of_each(pipe(x), y).backward()  # type: ignore[no-untyped-call]
    # a power of two as the number of samples, so that dividing rounds nothing
    other = Pipeline(inside, sum_of_each, schedule=schedule, count_fn=len, **options)  # type: ignore[arg-type]
    other.step(x, y)
    for (name, a), b in zip(outside.named_parameters(), inside.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name
    for found, wanted in zip(outside.buffers(), inside.buffers(), strict=True):
        assert torch.equal(found, wanted)
    pipe.close()
    other.close()


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_gradients_go_on_into_what_made_the_inputs(backend: str) -> None:
    torch.manual_seed(0)
    before, after = nn.Linear(4, 4), nn.Linear(3, 2)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    plain = copy.deepcopy(nn.Sequential(before, *inner, after))
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2, backend=backend)
    x = torch.randn(4, 4)
    after(pipe(before(x))).square().mean().backward()
    plain(x).square().mean().backward()
    whole = [*before.parameters(), *inner.parameters(), *after.parameters()]
    for found, wanted in zip(whole, plain.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.allclose(found.grad, wanted.grad, atol=1e-7)
    pipe.close()


def test_a_step_takes_gradients_into_what_made_the_inputs_as_well() -> None:
    torch.manual_seed(0)
    before = nn.Linear(4, 4)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 3)
    mse_loss(inner(before(x)), y).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad for p in [x, *before.parameters()]]
    x.grad = None
    before.zero_grad()
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2)
    pipe.step(before(x), y)
    for found, expected in zip([x, *before.parameters()], wanted, strict=True):
        assert found.grad is not None
        assert expected is not None
        assert torch.allclose(found.grad, expected, atol=1e-7)
    pipe.close()


def test_two_outputs_may_wait_for_one_loss() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    plain = copy.deepcopy(inner)
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    (pipe(a) * pipe(b)).sum().backward()
    (plain(a) * plain(b)).sum().backward()
    for found, wanted in zip(inner.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.allclose(found.grad, wanted.grad, atol=1e-6)
    pipe.close()


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"double": 2 * x, "rank": x.argmax(1)}


def test_an_output_may_be_a_dict_with_what_has_no_gradient() -> None:
    pipe = Pipeline([nn.Linear(4, 3), Pair()], mse_loss, num_ranks=2, num_microbatches=2)
    output = pipe(torch.randn(5, 4))
    assert output["double"].requires_grad
    assert not output["rank"].requires_grad
    assert output["rank"].shape == (5,)
    output["double"].sum().backward()
    assert next(pipe.parameters()).grad is not None
    pipe.close()


class Add(nn.Module):
    def forward(self, x: Tensor, shift: Tensor, scale: float) -> Tensor:
        return x * scale + shift


def test_further_inputs_are_given_by_name() -> None:
    layers = LayerSequence(
        (Layer("a", nn.Linear(4, 4)), Layer("b", Add(), reads=("x", "shift", "scale")))
    )
    pipe = Pipeline(layers, mse_loss, num_ranks=2, num_microbatches=2)
    x, shift = torch.randn(5, 4), torch.randn(5, 4)
    with torch.no_grad():
        wanted = layers.layers[0].module(x) * 0.5 + shift
        assert torch.allclose(pipe(x, shift=shift, scale=0.5), wanted)
    pipe.step(x, torch.zeros(5, 4), shift=shift, scale=0.5)
    pipe.verify(x, torch.zeros(5, 4), shift=shift, scale=0.5)
    pipe.close()


def test_a_backward_that_runs_twice_is_told() -> None:
    pipe = Pipeline(model(), mse_loss, num_ranks=2, num_microbatches=2)
    output = pipe(torch.randn(4, 4))
    output.sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match="backward ran twice through one output"):
        output.sum().backward()
    pipe.close()


def test_a_layer_that_fails_on_the_way_back_is_named() -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("no way back")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            if y.requires_grad:
                y.register_hook(fail)  # type: ignore[no-untyped-call]
            return y

    pipe = Pipeline(
        [nn.Linear(4, 4), Failing(), nn.Linear(4, 4)], mse_loss, num_ranks=3, num_microbatches=2
    )
    output = pipe(torch.randn(4, 4))
    with pytest.raises(StageError, match=r"^rank 1 failed in layer '1' at 1B0 \(backward"):
        output.sum().backward()
    pipe.close()
