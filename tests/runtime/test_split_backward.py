"""The split backward: what each half does, for all functions that use weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stageline.runtime.exactness.inner_gradients import InnerGradients, RepeatForward
from stageline.runtime.stage.split_backward import add_weight_gradients
from stageline.runtime.stage.weight_calls import WeightCallInterceptor


class Product(nn.Module):
    """Weights used by matmul, and by a function that is not intercepted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.scale


class Twice(nn.Module):
    """One weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = self.linear(torch.tanh(self.linear(x)))
        return twice


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x[None]  # one tensor in three places
        mixed: Tensor = self.attention(y, y, y, need_weights=False)[0]
        return mixed[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without bias": lambda: nn.Linear(6, 4, bias=False),
    "several": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.Flatten()),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 44, 3, padding=1), nn.Conv1d(44, 44, 1), nn.Flatten()
    ),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.RMSNorm(6), nn.GroupNorm(2, 6)),
    "matmul, and one not caught": Product,
    "a weight used twice": Twice,
    "attention": Attention,
}


def run(module: nn.Module, *, in_halves: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Run two micro-batches; return the last input gradient and all weight gradients."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    for _ in range(2):
        x = torch.randn(5, 6, requires_grad=True)
        if in_halves:
            with WeightCallInterceptor() as catch:
                output = module(x)
            output.square().sum().backward()
            add_weight_gradients(catch.calls)
        else:
            module(x).square().sum().backward()
    assert x.grad is not None
    return x.grad, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_both_halves_give_the_bits_of_a_whole_backward(make: Callable[[], nn.Module]) -> None:
    whole, weights = run(make(), in_halves=False)
    halves, later = run(make(), in_halves=True)
    assert torch.equal(whole, halves)
    for name, gradient in weights.items():
        found = later[name]
        assert gradient is not None
        assert found is not None
        assert torch.equal(gradient, found), name


def test_weights_have_no_gradient_before_the_second_half() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    with WeightCallInterceptor() as catch:
        output = module(torch.randn(5, 6, requires_grad=True))
    output.sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    add_weight_gradients(catch.calls)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("by_name", [False, True])
def test_convolutions_with_little_work_for_what_they_hold_defer_nothing(by_name: bool) -> None:
    class Convolution(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            if not by_name:
                return super().forward(x)
            w, b, groups = self.weight, self.bias, self.groups
            return nn.functional.conv2d(input=x, weight=w, bias=b, groups=groups)

    wide, narrow, depthwise = (
        Convolution(64, 64, 1),
        Convolution(64, 8, 1),
        Convolution(8, 8, 3, groups=8),
    )
    with WeightCallInterceptor() as catch:
        output = depthwise(narrow(wide(torch.randn(2, 64, 4, 4))))
    output.sum().backward()
    assert [call.weights for call in catch.calls] == [[wide.weight, wide.bias]]
    assert wide.weight.grad is None
    assert narrow.weight.grad is not None
    assert depthwise.weight.grad is not None


def test_a_first_layer_defers_its_weights_although_nothing_before_it_needs_gradients() -> None:
    embedding = nn.Embedding(10, 4)
    with WeightCallInterceptor() as catch:
        output = embedding(torch.tensor([1, 2, 2]))
    output.sum().backward()
    assert [p.grad for p in embedding.parameters()] == [None]
    add_weight_gradients(catch.calls)
    (gradient,) = (p.grad for p in embedding.parameters())
    assert gradient is not None
    assert gradient[2].tolist() == [2.0] * 4


def test_frozen_weights_are_left_alone() -> None:
    linear = nn.Linear(6, 2).requires_grad_(False)
    x = torch.randn(5, 6, requires_grad=True)
    with WeightCallInterceptor() as catch:
        linear(x).sum().backward()
    assert not catch.calls
    assert x.grad is not None


def test_weights_whose_gradients_are_one_tensor_do_not_share_it() -> None:
    first, second = (nn.Parameter(torch.zeros(5, 3)) for _ in range(2))
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3)
    for _ in range(2):
        with WeightCallInterceptor() as catch:
            output = torch.addmm(first, x, w) + torch.addmm(second, x, w)
        output.sum().backward()  # type: ignore[no-untyped-call]
        add_weight_gradients(catch.calls)
    assert torch.equal(gradient_of(first), torch.full((5, 3), 2.0))
    assert torch.equal(gradient_of(second), torch.full((5, 3), 2.0))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_a_forward_that_differentiates_intercepted_calls_is_repeated() -> None:
    linear = nn.Linear(4, 1)
    x = torch.randn(3, 4, requires_grad=True)
    known = InnerGradients()
    with pytest.raises(RepeatForward), WeightCallInterceptor(known):
        torch.autograd.grad(torch.tanh(linear(x)).sum(), x, create_graph=True)
    with WeightCallInterceptor(known) as catch:
        torch.autograd.grad(torch.tanh(linear(x)).sum(), x, create_graph=True)
    assert not catch.calls


def test_a_weight_gets_all_of_its_gradient_in_one_half() -> None:
    linear = nn.Linear(4, 1)
    x = torch.randn(3, 4, requires_grad=True)
    known = InnerGradients()
    with pytest.raises(RepeatForward), WeightCallInterceptor(known):
        linear(x) * linear.weight.norm()
    with WeightCallInterceptor(known) as catch:
        linear(x) * linear.weight.norm()
    assert not catch.calls


def test_products_are_not_fused_where_a_hook_wants_to_see_the_gradient() -> None:
    """Weight and bias."""
    for name in ("weight", "bias"):
        linear, seen = nn.Linear(4, 3), list[Tensor]()
        linear.get_parameter(name).register_hook(seen.append)  # type: ignore[no-untyped-call]
        with WeightCallInterceptor() as catch:
            output = linear(torch.randn(5, 4, requires_grad=True))
        output.sum().backward()
        add_weight_gradients(catch.calls, fused=True)
        assert len(seen) == 1
