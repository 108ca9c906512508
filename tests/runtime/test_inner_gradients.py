"""Layers that differentiate or transform functions themselves train as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.utils.checkpoint import checkpoint

from stageline.errors import ParityError, StageError
from stageline.pipeline import Pipeline
from stageline.runtime.stage import forward_pass
from stageline.zoo.cases import grouped

Gradients = list[Tensor | None]
WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "backend": "serial", "recompute": "always"},
    {"schedule": "zb_h1", "backend": "serial"},
    {"schedule": "zb_h1", "backend": "threads", "recompute": "always"},
    {"schedule": "zbv", "backend": "threads"},
]


def tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found


class Block(nn.Module):
    """Two linears, which subclasses use in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


class Energy(Block):
    """Adds the gradient of an energy, which itself is not differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.body(z).square().sum(), z)
        return self.body(x + found)


class Penalty(Block):
    """Adds the gradient of an energy, with gradients to the weights."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.body(z).square().sum(), z, create_graph=True)
        return self.body(x) + found


class InnerStep(Block):
    """Meta-learning: a step of gradient descent inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        loss = F.linear(x.detach(), self.a.weight, self.a.bias).square().mean()
        weight, bias = torch.autograd.grad(loss, (self.a.weight, self.a.bias), create_graph=True)
        return tensor(
            F.linear(x, self.a.weight - 0.1 * weight, self.a.bias - 0.1 * bias) + self.b(x)
        )


class OwnLoss(Block):
    """An auxiliary loss whose backward runs inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        for scale in (1.0, 0.3):
            loss = self.body(x.detach() * scale).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        return self.body(x)


class OwnLossByFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        loss = self.body(x.detach()).square().mean()
        torch.autograd.backward([loss], [torch.ones_like(loss)])
        return self.body(x)


class GradOfWeights(Block):
    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.a.named_parameters())
        found = grad(lambda w: functional_call(self.a, w, (x,)).square().mean())(weights)
        result: Tensor = self.a(x) + F.linear(x, found["weight"]) + self.b(x)
        return result


class GradOfInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return tensor(self.body(x) + grad(lambda z: torch.tanh(self.body(z)).sum())(x))


class Vmap(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.vmap(self.a)(x) + self.body(x)
        return result


class Jvp(Block):
    def forward(self, x: Tensor) -> Tensor:
        value, tangent = jvp(self.body, (x,), (torch.ones_like(x),))  # type: ignore[misc]  # two, without has_aux
        result: Tensor = value + tangent
        return result


class Vjp(Block):
    def forward(self, x: Tensor) -> Tensor:
        value, pull_back = vjp(self.body, x)  # type: ignore[misc]  # two, without has_aux
        result: Tensor = value + pull_back(torch.ones_like(value))[0]
        return result


class Jacobian(Block):
    def forward(self, x: Tensor) -> Tensor:
        return tensor(self.body(x) + torch.vmap(jacrev(self.body))(x).sum(1))


class Hessian(Block):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.vmap(hessian(lambda z: torch.tanh(self.body(z)).sum()))(x)
        return tensor(self.body(x) + found.sum(1))


class ForwardMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
            value, tangent = forward_ad.unpack_dual(self.body(dual))  # type: ignore[no-untyped-call]
            result: Tensor = value + tangent
        return result


class Checkpointed(Block):
    """A checkpointed part, one of whose weights is used outside as well."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return tensor(part + self.a(x))


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Around(torch.autograd.Function):
    """An autograd function whose backward differentiates a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear, *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y, ctx.weights = torch.tanh(linear(ctx.x)), weights
        output: Tensor = ctx.y.detach()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, *rest = torch.autograd.grad(ctx.y, (ctx.x, *ctx.weights), gradient)
        return first, None, *rest


class CustomFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Around.apply(x, self.a, *self.a.parameters())  # type: ignore[no-untyped-call]
        return tensor(result + self.b(x))


class WithoutGraph(Block):
    """Runs a part without recording a graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.body(x)
        with torch.inference_mode():
            size = float(self.a(x).norm())
        return self.body(x) + target / size


class Equilibrium(Block):
    """An implicit layer: a hook solves for the gradient of a fixed point."""

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.1 * self.body(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.step(z, x)
        z = self.step(z, x)
        point = z.detach().requires_grad_()
        image = self.step(point, x)

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(5):
                found = torch.autograd.grad(image, point, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)  # type: ignore[no-untyped-call]
        return z


class HookOfWeights(Block):
    """A hook takes gradients of weights."""

    def forward(self, x: Tensor) -> Tensor:
        loss, z = self.body(x.detach()).square().mean(), self.body(x)

        def add(gradient: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(loss, self.a.weight, allow_unused=True)
            return gradient + found.sum()

        z.register_hook(add)  # type: ignore[no-untyped-call]
        return z


class HookThatGoesBack(Block):
    def forward(self, x: Tensor) -> Tensor:
        loss, z = self.body(x.detach()).square().mean(), self.body(x)
        z.register_hook(lambda _: loss.backward())  # type: ignore[no-untyped-call]
        return z


class BothWays(Block):
    """A weight used by functions of which only one can be deferred."""

    def forward(self, x: Tensor) -> Tensor:
        return tensor(self.body(x) * self.a.weight.norm() + torch.tanh(x) @ self.b.weight.T)


class Normed(Penalty):
    """A penalty after state that must be changed once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(self.norm(x))


LAYERS = [
    *(Energy, Penalty, InnerStep, OwnLoss, OwnLossByFunction, GradOfWeights, GradOfInput, Vmap),
    *(Jvp, Vjp, Jacobian, Hessian, ForwardMode, Checkpointed, CheckpointedReentrant),
    *(CustomFunction, WithoutGraph, Equilibrium, HookOfWeights, HookThatGoesBack, BothWays, Normed),
]


def chain(layer: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)
    ends = nn.Linear(6, 6), nn.Linear(6, 6)
    return nn.Sequential(ends[0], nn.Tanh(), layer(), nn.Linear(6, 6), layer(), nn.Tanh(), ends[1])


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(8, 6), torch.randn(8, 6)


def gradients(model: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(model: nn.Module, loss_fn: Callable[..., Tensor] = F.mse_loss) -> Iterator[Gradients]:
    """Yield the gradients of a plain loop's steps."""
    x, y = batch()
    while True:
        model.zero_grad()
        for inputs, target in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = loss_fn(model(inputs), target)
            loss.backward(torch.full_like(loss, 0.25))  # type: ignore[no-untyped-call]
        yield gradients(model)


def piped(pipe: Pipeline) -> Iterator[Gradients]:
    model = pipe.model
    while True:
        model.zero_grad()
        pipe.step(*batch())
        yield gradients(model)


def differ(a: Gradients, b: Gradients) -> list[int]:
    """Return the numbers of the parameters whose gradients differ."""
    return [
        number
        for number, (one, other) in enumerate(zip(a, b, strict=True))
        if not (one is None and other is None)
        and (one is None or other is None or not torch.equal(one, other))
    ]


def opened(model: nn.Module, loss_fn: Callable[..., Tensor] = F.mse_loss, **way: Any) -> Pipeline:
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "batch_norm": "microbatch"}
    return Pipeline(model, loss_fn, **grouped(options | way))


def check_like_a_plain_loop(
    make: Callable[[], nn.Sequential],
    loss_fn: Callable[[nn.Sequential], Callable[..., Tensor]] = lambda _: F.mse_loss,
) -> None:
    """Compare gradients and buffers of two steps with a plain loop."""
    expected = make()
    steps = plain(expected, loss_fn(expected))
    wanted = [next(steps) for _ in range(2)]
    for way in WAYS:
        model = make()
        pipe = opened(model, loss_fn(model), **way)
        for number, (want, found) in enumerate(zip(wanted, piped(pipe), strict=False)):
            assert not differ(found, want), (way, number)
        for buffer, other in zip(model.buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), way
        pipe.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, for jvp
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_differentiates_trains_as_in_a_plain_loop(layer: type[Block]) -> None:
    check_like_a_plain_loop(lambda: chain(layer))


@pytest.mark.parametrize("layer", [Energy, OwnLoss, GradOfInput, Equilibrium, BothWays, Normed])
def test_verify_finds_no_difference(layer: type[Block]) -> None:
    """In the first step, and in a later one, in which nothing is observed."""
    for accumulate in ("exact", "fused"):
        pipe = opened(chain(layer), schedule="zb_h1", backend="serial", accumulate=accumulate)
        for _ in range(2):
            pipe.verify(*batch())
            pipe.step(*batch())
        pipe.close()


def test_verify_detects_gradients_that_are_added_in_the_wrong_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients from inside a forward that are added at once, in the wrong order."""
    monkeypatch.setattr(forward_pass, "collected_gradients", lambda _: nullcontext([]))
    pipe = opened(chain(OwnLoss), schedule="1f1b", backend="serial")
    with pytest.raises(ParityError, match="differs from a plain loop"):
        pipe.verify(*batch())
    pipe.close()


class Both(Block):
    """Also returns the hidden activation, for the loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.a(x))
        return {"hidden": hidden, "output": self.b(hidden)}


def with_both(layer: Callable[[], nn.Module] = Both) -> nn.Sequential:
    return nn.Sequential(*list(chain(nn.Tanh))[:-1], layer())


def penalty_of_hidden(_: nn.Sequential) -> Callable[..., Tensor]:
    def loss_fn(found: dict[str, Tensor], target: Tensor) -> Tensor:
        output, hidden = found["output"], found["hidden"]
        (slope,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        return F.mse_loss(output, target) + slope.square().mean()

    return loss_fn


def penalty_of_a_weight(model: nn.Sequential) -> Callable[..., Tensor]:
    weight = model.get_parameter("6.weight")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss + slope.square().mean()

    return loss_fn


def decay_of_a_weight(model: nn.Sequential) -> Callable[..., Tensor]:
    weight = model.get_parameter("6.weight")
    return lambda output, target: F.mse_loss(output, target) + weight.square().sum()


def test_a_loss_may_differentiate_too() -> None:
    check_like_a_plain_loop(with_both, penalty_of_hidden)
    check_like_a_plain_loop(lambda: chain(nn.Tanh), penalty_of_a_weight)
    check_like_a_plain_loop(lambda: chain(Penalty), penalty_of_a_weight)
    check_like_a_plain_loop(lambda: chain(nn.Tanh), decay_of_a_weight)


class Later(Block):
    """Starts to differentiate in a later step."""

    has_begun = False

    def forward(self, x: Tensor) -> Tensor:
        return self.begun(x) if Later.has_begun else self.body(x)

    def begun(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LaterPenalty(Later):
    begun = Penalty.forward


class LaterGradOfInput(Later):
    begun = GradOfInput.forward


class LaterInnerStep(Later):
    begun = InnerStep.forward


class LaterBothWays(Later):
    begun = BothWays.forward


class LaterBehindState(LaterPenalty):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad or not torch.is_grad_enabled():
            return super().forward(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x + self.mean)


class LaterBehindCounter(LaterPenalty):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x * (1 + 0.1 * self.num_calls))


class LaterBehindNorm(LaterPenalty):
    """Batch norm changes its statistics without incrementing their version."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize(
    "layer",
    [
        LaterPenalty,
        LaterGradOfInput,
        LaterInnerStep,
        LaterBothWays,
        LaterBehindState,
        LaterBehindCounter,
        LaterBehindNorm,
    ],
)
def test_a_layer_may_start_to_differentiate_in_a_later_step(layer: type[Later]) -> None:
    """Its stage runs the forward again, which must not change the layer's state twice."""
    for way in WAYS:
        model, expected = chain(layer), chain(layer)
        pipe = opened(model, **way)
        steps = zip(piped(pipe), plain(expected), strict=False)
        for has_begun in (False, False, True, True):
            Later.has_begun = has_begun
            found, want = next(steps)
            assert not differ(found, want), way
            for buffer, other in zip(model.buffers(), expected.buffers(), strict=True):
                assert torch.equal(buffer, other), way
        pipe.close()


class LaterOwnLoss(Later):
    begun = OwnLoss.forward


class LaterHook(Later):
    begun = HookOfWeights.forward


class LaterHookOfInput(Later):
    """A hook takes gradients of an input, through calls whose weights get theirs later."""

    def begun(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        loss, z = self.body(point).square().mean(), self.body(x)
        z.register_hook(lambda gradient: gradient + torch.autograd.grad(loss, point)[0])  # type: ignore[no-untyped-call]
        return z


@pytest.mark.parametrize("layer", [LaterOwnLoss, LaterHook, LaterHookOfInput])
def test_a_layer_that_starts_too_late_is_an_error_and_works_in_the_next_step(
    layer: type[Later],
) -> None:
    for backend in ("serial", "threads"):
        Later.has_begun = False
        pipe = opened(chain(layer), schedule="zb_h1", backend=backend)
        next(piped(pipe))
        Later.has_begun = True
        with pytest.raises(StageError, match="set gradients to zero and run the step again"):
            next(piped(pipe))
        assert not differ(next(piped(pipe)), next(plain(chain(layer))))
        pipe.close()


class ReachesBack(Block):
    def forward(self, x: Tensor) -> Tensor:
        loss = self.body(x).square().mean()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return self.body(x)


def test_a_backward_inside_a_forward_that_leads_to_other_stages_is_refused() -> None:
    for way in WAYS:
        pipe = opened(chain(ReachesBack), **way)
        with pytest.raises(StageError, match="detach"):
            pipe.step(*batch())
        pipe.close()


def test_a_backward_inside_a_forward_of_the_first_stage_works() -> None:
    """The input needs no gradient, so the backward ends in the stage."""

    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), ReachesBack(), nn.Linear(6, 6), nn.Linear(6, 6))

    for schedule in ("1f1b", "zb_h1"):
        pipe = opened(make(), schedule=schedule, balance=[2, 2], backend="serial")
        assert not differ(next(piped(pipe)), next(plain(make())))
        pipe.close()


class Slow(Jvp):
    """Stays in forward mode for a while, so that other threads run meanwhile."""

    def body(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = super().body(x)
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_threads_do_not_interfere_in_forward_mode() -> None:
    expected = next(plain(chain(Slow)))
    pipe = opened(chain(Slow), schedule="zb_h1", backend="threads")
    steps = piped(pipe)
    for _ in range(5):
        assert not differ(next(steps), expected)
    pipe.close()


def test_a_stage_that_does_not_differentiate_defers_its_weight_gradients() -> None:
    """Only a layer of the user's own is observed, and only in the first step."""
    for layer, num_watched in ((nn.Tanh, 0), (Usual, 1)):
        pipe = opened(chain(layer), schedule="zb_h1", backend="serial")
        first, counts = pipe._session.assembly.stages[0], list[int]()
        usual = first.weight_gradients

        def counted(
            microbatch: int, in_flight: Any, usual: Any = usual, counts: Any = counts
        ) -> None:
            counts.append(len(in_flight.deferred[microbatch][0]))
            usual(microbatch, in_flight)

        first.weight_gradients = counted  # type: ignore[method-assign]
        for _ in range(2):
            pipe.step(*batch())
        parts = [part for layer in first.stage_layers for part in layer.module.modules()]
        linears = sum(isinstance(part, nn.Linear) for part in parts)
        assert counts[4:] == [linears] * 4
        assert counts[:4] == [linears - 2 * num_watched] * 4
        pipe.close()


class Usual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)
