"""`pipe(inputs)` in training: the caller computes a loss of the output, and its backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError, StageError
from stageline.model.layers import Layer, LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped


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
def test_a_loss_of_the_output_gives_the_gradients_of_a_step(
    schedule: str, recompute: str, backend: str
) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    outside, inside = model(), model()
    options = {"num_ranks": 2, "num_microbatches": 4, "backend": backend, "recompute": recompute}
    pipe = Pipeline(outside, mse_loss, schedule=schedule, **grouped(options))
    mean_of_each(pipe(x), y).backward()  # type: ignore[no-untyped-call]
    # a power of two as the number of samples, so that dividing rounds nothing
    other = Pipeline(
        inside, sum_of_each, schedule=schedule, options=Options(count_fn=len), **grouped(options)
    )
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
def test_gradients_reach_the_graph_of_the_inputs(backend: str) -> None:
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


def test_a_step_brings_gradients_to_the_graph_of_the_inputs() -> None:
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


def test_a_backward_that_runs_twice_is_an_error() -> None:
    pipe = Pipeline(model(), mse_loss, num_ranks=2, num_microbatches=2)
    output = pipe(torch.randn(4, 4))
    output.sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match="backward ran twice through one output"):
        output.sum().backward()
    pipe.close()


def test_a_layer_that_fails_in_the_backward_is_named() -> None:
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


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        spectrum: Tensor = torch.fft.fft(x)
        return spectrum


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_complex_outputs_have_gradients(backend: str) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Spectrum())
    plain = copy.deepcopy(inner)
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2, backend=backend)
    x = torch.randn(6, 4)
    output = pipe(x)
    assert output.dtype == torch.complex64
    output.abs().sum().backward()
    plain(x).abs().sum().backward()
    for found, wanted in zip(inner.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.allclose(found.grad, wanted.grad, atol=1e-6)
    pipe.close()


class Several(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x.square()
        return {"y": y, "z": torch.complex(x, y), "top": x.argmax(1), "is": x > 0, "d": y.detach()}


def test_outputs_require_gradients_where_those_of_a_plain_model_do() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), Several())
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")
    x = torch.randn(6, 4)
    wanted = {name: tensor.requires_grad for name, tensor in inner(x).items()}
    assert {name: tensor.requires_grad for name, tensor in pipe(x).items()} == wanted
    inner.requires_grad_(requires_grad=False)
    assert not any(tensor.requires_grad for tensor in pipe(x).values())
    pipe(x.requires_grad_())["z"].abs().sum().backward()
    assert x.grad is not None


def two_models() -> tuple[nn.Sequential, nn.Sequential, Pipeline]:
    """Return a pipeline with two micro-batches of equal size, and a plain model."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2, backend="threads")
    return inner, copy.deepcopy(inner), pipe


def in_halves(plain: nn.Module, x: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the sum of both micro-batches' gradients in a plain loop."""
    parts = [torch.autograd.grad(plain(half).sum(), inputs) for half in x.chunk(2)]
    return [a + b for a, b in zip(*parts, strict=True)]


def test_a_gradient_of_the_input_only_does_not_change_the_weights() -> None:
    inner, plain, pipe = two_models()
    x = torch.randn(6, 4, requires_grad=True)
    (found,) = torch.autograd.grad(pipe(x).sum(), x)
    (wanted,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.allclose(found, wanted)
    assert all(p.grad is None for p in inner.parameters())
    pipe(x).sum().backward()  # and what was there stays, to the bit
    before = [p.grad.clone() for p in inner.parameters() if p.grad is not None]
    torch.autograd.grad(pipe(x).sum(), x)
    after = [p.grad for p in inner.parameters() if p.grad is not None]
    assert len(before) == len(after) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pipe.close()


def test_autograd_grad_returns_gradients_of_weights() -> None:
    inner, plain, pipe = two_models()
    x = torch.randn(6, 4, requires_grad=True)
    wanted = in_halves(plain, x, list(plain.parameters()))
    for chosen in ([0, 1, 2, 3], [2], [0, 3]):
        weights = [list(inner.parameters())[i] for i in chosen]
        *found, of_x = torch.autograd.grad(pipe(x).sum(), [*weights, x])
        assert all(torch.equal(a, wanted[i]) for a, i in zip(found, chosen, strict=True))
        assert of_x.shape == x.shape
        assert all(p.grad is None for p in inner.parameters())
    assert x.grad is None
    pipe.close()


def test_backward_with_inputs_adds_to_those_only() -> None:
    inner, plain, pipe = two_models()
    x = torch.randn(6, 4, requires_grad=True)
    chosen = inner[2].weight
    for _ in range(2):  # the second time there is something to add to
        pipe(x).sum().backward(inputs=[chosen])
        for half in x.chunk(2):
            plain(half).sum().backward(inputs=[plain[2].weight])
    assert torch.equal(chosen.grad, plain[2].weight.grad)  # type: ignore[arg-type]
    assert all(p.grad is None for p in inner.parameters() if p is not chosen)
    assert x.grad is None
    y = x.detach().requires_grad_()
    pipe(y).sum().backward(inputs=[y])
    assert y.grad is not None
    assert all(p.grad is None for p in inner.parameters() if p is not chosen)
    pipe.close()


def test_some_outputs_only_or_one_of_them_twice() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), Several())
    plain = copy.deepcopy(inner)
    pipe = Pipeline(inner, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")
    x = torch.randn(6, 4)
    for model in (pipe, plain):
        output = model(x)
        ((output["y"] * 2).sum() + output["y"].exp().sum()).backward()
    for found, wanted in zip(inner.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, atol=1e-5)  # type: ignore[arg-type]


def test_hooks_on_weights_are_called_as_in_a_plain_loop() -> None:
    inner, plain, pipe = two_models()
    seen: dict[str, list[Tensor]] = {"inner": [], "plain": []}
    list(inner.parameters())[2].register_hook(seen["inner"].append)  # type: ignore[no-untyped-call]
    list(plain.parameters())[2].register_hook(seen["plain"].append)  # type: ignore[no-untyped-call]
    x = torch.randn(6, 4, requires_grad=True)
    pipe(x).sum().backward()
    for half in x.chunk(2):
        plain(half).sum().backward()
    assert len(seen["inner"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))
    with pytest.raises(ModelError, match="other weights have hooks"):
        torch.autograd.grad(pipe(x).sum(), x)
    assert len(seen["inner"]) == 2
    pipe.close()


class Constant(nn.Module):
    """Returns its weight, whatever its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, _: Tensor) -> Tensor:
        return self.weight


def test_an_output_in_evaluation_is_part_of_no_graph_even_if_it_is_a_weight() -> None:
    with Pipeline(
        nn.Sequential(nn.Linear(4, 4), Constant()), mse_loss, num_ranks=2, num_microbatches=2
    ) as pipe:
        assert pipe(torch.ones(4, 4)).requires_grad
        pipe.eval()
        output = pipe(torch.ones(4, 4))
    assert torch.equal(output, torch.ones(4, 3))
    assert not output.requires_grad
