"""A step that is undone and repeated with clipped gradients equals one that was clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from stageline.errors import ModelError
from stageline.runtime.optimizers.undo import check_undoable, prepare_undo, undo

Build = Callable[[Sequence[nn.Parameter]], Optimizer]

SHAPES = ((7, 5), (33,))
KINDS: tuple[tuple[type[Optimizer], dict[str, Any]], ...] = (
    (SGD, {}),
    (SGD, {"weight_decay": 0.1}),
    (SGD, {"weight_decay": 0.1, "maximize": True}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "maximize": True, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"weight_decay": 0.1, "maximize": True}),
    (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (Adam, {"betas": (0.0, 0.99)}),
    (Adam, {"betas": (0.0, 0.0), "eps": 1e-3}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"weight_decay": 0.1, "maximize": True, "betas": (0.5, 0.9)}),
)
LOOP = {"foreach": False}
VARIANTS = (LOOP, {"foreach": True}, {"fused": True})


def weights_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def gradients_of(weights: Sequence[Tensor], step: int, scale: float) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(w.shape, generator=random) * scale).to(w.dtype) for w in weights]


def give(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def on(device: str, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, device=device, dtype=dtype))


def trained(
    build: Build, undone: set[int], clip: float = 0.3, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], Optimizer]:
    """Make six steps with clipped gradients; those in `undone` first without clipping."""
    weights = weights_of(dtype)
    optimizer = build(weights)
    for step in range(6):
        if step in undone:
            give(weights, gradients_of(weights, step, 0.5))
            before = prepare_undo(optimizer)
            optimizer.step()
            undo(optimizer, before)
        give(weights, gradients_of(weights, step, 0.5 * clip))
        optimizer.step()
    return weights, optimizer


def assert_same(
    ours: tuple[Sequence[Tensor], Optimizer], twin: tuple[Sequence[Tensor], Optimizer], atol: float
) -> None:
    for weight, other in zip(ours[0], twin[0], strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=atol)
        states = dict(ours[1].state.get(weight, {})), dict(twin[1].state.get(other, {}))
        torch.testing.assert_close(*states, rtol=0, atol=atol)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_step_made_again_with_clipped_gradients_is_as_if_clipped_at_once(
    kind: type[Optimizer], options: dict[str, Any], variant: dict[str, Any]
) -> None:
    def build(weights: Sequence[nn.Parameter]) -> Optimizer:
        return kind(weights, lr=0.02, **options, **variant)  # type: ignore[call-arg]  # all have it

    assert_same(trained(build, undone={0, 3}), trained(build, undone=set()), atol=1e-6)


@st.composite
def optimizers(draw: st.DrawFn) -> Build:
    """A second moment shorter than the first makes Adam's steps huge, so there is none."""
    options: dict[str, Any] = {
        "lr": draw(st.floats(0, 0.1)),
        "weight_decay": draw(st.just(0.0) | st.floats(0, 1)),
        "maximize": draw(st.booleans()),
        "foreach": False,
    }
    if draw(st.booleans()):
        options["momentum"] = draw(st.just(0.0) | st.floats(0.01, 0.99))
        options["dampening"] = draw(st.just(0.0) | st.floats(0, 1))
        options["nesterov"] = options["momentum"] > 0 and options["dampening"] == 0
        return lambda weights: SGD(weights, **options)
    first = draw(st.just(0.0) | st.floats(0.01, 0.95))
    options["betas"] = first, draw(st.floats(max(first, 0.01), 0.999))
    options["eps"] = draw(st.floats(1e-8, 1e-3))
    kind = draw(st.sampled_from((Adam, AdamW)))
    return lambda weights: kind(weights, **options)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(optimizers(), st.sets(st.integers(0, 5), min_size=1), st.floats(0.3, 1))
def test_undone_steps_change_nothing_with_any_options(
    build: Build, undone: set[int], clip: float
) -> None:
    assert_same(trained(build, undone, clip), trained(build, set(), clip), atol=1e-6 * len(undone))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_an_undone_step_costs_two_units_in_the_last_place_of_any_precision(
    kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    def build(weights: Sequence[nn.Parameter]) -> Optimizer:
        return kind(weights, lr=0.02, **options)  # type: ignore[call-arg]  # all have it

    unit = 2 * torch.finfo(dtype).eps  # of what is between 2 and 4, as the largest weights are
    ours, twin = (trained(build, undone, dtype=dtype) for undone in ({3}, set[int]()))
    assert_same(ours, twin, atol=2 * unit)


def test_a_first_step_leaves_no_state_behind() -> None:
    for kind, options in KINDS:
        weights = weights_of()
        optimizer = kind(weights, lr=0.02, **options)  # type: ignore[call-arg]  # all have it
        give(weights, gradients_of(weights, 0, 0.5))
        before = prepare_undo(optimizer)
        optimizer.step()
        undo(optimizer, before)
        assert not optimizer.state
        assert_same((weights, optimizer), (weights_of(), SGD(weights_of())), atol=1e-6)


def test_a_weight_whose_first_gradient_comes_later_has_its_first_step_then() -> None:
    def build(weights: Sequence[nn.Parameter], *, is_undone: bool) -> Optimizer:
        optimizer = SGD(weights, 0.1, momentum=0.9, dampening=0.5)
        for step in range(3):
            gradients = gradients_of(weights, step, 0.5)
            give(weights[:1], gradients[:1])
            if step > 0:
                give(weights[1:], gradients[1:])
            if step == 1 and is_undone:
                before = prepare_undo(optimizer)
                optimizer.step()
                undo(optimizer, before)
                assert list(optimizer.state) == [weights[0]]
            optimizer.step()
        return optimizer

    ours, twins = weights_of(), weights_of()
    pair = build(ours, is_undone=True), build(twins, is_undone=False)
    assert_same((ours, pair[0]), (twins, pair[1]), atol=1e-6)


def test_a_momentum_of_none_from_an_old_checkpoint_is_no_momentum() -> None:
    weight = on("cpu")
    optimizer = SGD([weight], 0.1, momentum=0.9, dampening=0.5)
    optimizer.state[weight]["momentum_buffer"] = None
    weight.grad = torch.full_like(weight, 0.5)
    before = prepare_undo(optimizer)
    optimizer.step()
    undo(optimizer, before)
    weight.grad = torch.full_like(weight, 0.25)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], weight.grad)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_weight_without_a_gradient_is_left_alone(kind: type[SGD | Adam]) -> None:
    weights = weights_of()
    optimizer = kind(weights, lr=0.02, weight_decay=0.1)
    give(weights, gradients_of(weights, 0, 0.5))
    optimizer.step()
    weights[1].grad = None
    was = weights[1].detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[weights[1]].items()}
    before = prepare_undo(optimizer)
    optimizer.step()
    undo(optimizer, before)
    assert torch.equal(weights[1], was)
    assert all(torch.equal(optimizer.state[weights[1]][key], state[key]) for key in state)


@pytest.mark.parametrize("as_given", [float, torch.tensor])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_scheduler_may_have_changed_the_rate_since(
    kind: type[SGD | Adam], as_given: Callable[[float], float | Tensor]
) -> None:
    weights = weights_of()
    optimizer = kind(weights, lr=as_given(0.1), weight_decay=0.1)
    scheduler = StepLR(optimizer, step_size=1)
    give(weights, gradients_of(weights, 0, 0.5))
    before = prepare_undo(optimizer)
    optimizer.step()
    scheduler.step()
    undo(optimizer, before)
    assert_same((weights, optimizer), (weights_of(), optimizer), atol=1e-6)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_rates_and_betas_may_be_tensors() -> None:
    def build(weights: Sequence[nn.Parameter]) -> Optimizer:
        betas = torch.tensor(0.9), torch.tensor([0.99])
        return AdamW(weights, torch.tensor(0.02), betas)

    assert_same(trained(build, undone={0, 3}), trained(build, undone=set()), atol=1e-6)


def test_a_counter_on_the_device_corrects_as_coarsely_as_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No CPU can capture, so torch is told that it can; what it then computes is the same."""
    adam = import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda: ["cpu"])
    weights = weights_of()
    optimizer = Adam(weights, lr=1.0, betas=(0.9, 0.9999), capturable=True)
    give(weights, gradients_of(weights, 0, 0.5))
    before = prepare_undo(optimizer)
    optimizer.step()
    undo(optimizer, before)
    assert_same((weights, optimizer), (weights_of(), optimizer), atol=1e-6)


def test_groups_are_undone_with_their_own_options() -> None:
    def build(weights: Sequence[nn.Parameter]) -> Optimizer:
        first, second = weights
        groups = [{"params": [first], "lr": 0.1}, {"params": [second], "weight_decay": 0.0}]
        return AdamW(groups, lr=0.02, weight_decay=0.5)

    assert_same(trained(build, undone={0, 3}), trained(build, undone=set()), atol=1e-6)


def test_weights_and_state_stay_where_they_are_in_memory() -> None:
    weights = weights_of()
    optimizer = AdamW(weights)
    give(weights, gradients_of(weights, 0, 0.5))
    optimizer.step()
    tensors = [
        *weights,
        *(value for weight in weights for value in optimizer.state[weight].values()),
    ]
    places = [tensor.data_ptr() for tensor in tensors]
    before = prepare_undo(optimizer)
    optimizer.step()
    undo(optimizer, before)
    after = [*weights, *(value for weight in weights for value in optimizer.state[weight].values())]
    assert [tensor.data_ptr() for tensor in after] == places
    assert not before.without_state


def test_what_was_zero_has_a_square_root_afterwards() -> None:
    """A second moment of 0, a gradient that is undone, and then none."""
    weight = nn.Parameter(torch.zeros(10_000))
    optimizer = Adam([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    weight.grad = torch.linspace(-1, 1, 10_000)
    before = prepare_undo(optimizer)
    optimizer.step()
    undo(optimizer, before)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.isfinite().all()


class OurSGD(SGD):
    """An optimizer of the user's own."""


NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (Adagrad([on("cpu")]), "the optimizer is Adagrad, but only steps of exactly SGD, Adam"),
        (OurSGD([on("cpu")]), "the optimizer is OurSGD"),
        (Adam([on("cpu")], amsgrad=True), "group 0 of Adam has amsgrad=True"),
        (SGD([on("cpu")], differentiable=True), "has differentiable=True"),
        (AdamW([on("cpu")], lr=0.5, weight_decay=2), r"has lr \* weight_decay = 1"),
        (AdamW([on("cpu")], lr=torch.tensor(0.5), weight_decay=2), r"has lr \* weight_decay = 1"),
        (SGD([on("cpu")], lr=0.5, weight_decay=2), r"has lr \* weight_decay = 1"),
        (SGD([on("cpu")], lr=0.5, weight_decay=2, **NESTEROV), r"has lr \* weight_decay = 1"),
        (SGD([on("cpu")], **NESTEROV, foreach=True), "use foreach=False, or clip before the step"),
        (SGD([on("meta")], **NESTEROV), "use foreach=False, or clip before the step"),
        (SGD([on("cpu", torch.bfloat16)], fused=True), "which torch 2.13 skips"),
        (Adam([on("cpu", torch.complex64)]), "has complex weights"),
    ],
)
def test_steps_that_cannot_be_taken_back_are_refused_before_they_are_made(
    optimizer: Optimizer, reason: str
) -> None:
    for refuse in (check_undoable, prepare_undo):
        with pytest.raises(ModelError, match=reason):
            refuse(optimizer)


def test_the_group_that_is_refused_is_named() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [on("cpu")]},
        {"params": [on("cpu")], "amsgrad": True},
    ]
    with pytest.raises(ModelError, match="group 1 of Adam has amsgrad=True"):
        check_undoable(Adam(groups))


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(embedding.parameters())
    check_undoable(optimizer)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match="sparse gradients"):
        prepare_undo(optimizer)


def test_hooks_on_the_step_are_refused() -> None:
    optimizer = SGD([on("cpu")])
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ModelError, match="hooks on its step"):
        prepare_undo(optimizer)
    handle.remove()
    check_undoable(optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD([on("cpu")], lr=0.5, weight_decay=2, momentum=0.9),  # the decay is in the momentum
        Adam([on("cpu")], lr=0.5, weight_decay=2),  # and here in both moments
        SGD([on("cpu")], **NESTEROV),  # no foreach by default
        SGD([on("cpu")], **NESTEROV, fused=True),
        AdamW([on("cpu", torch.bfloat16)], lr=0.1, fused=True),
    ],
)
def test_similar_steps_can_be_undone(optimizer: Optimizer) -> None:
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.full_like(weight, 0.25)
    before = prepare_undo(optimizer)
    optimizer.step()
    assert (weight != 1).all()
    undo(optimizer, before)
    torch.testing.assert_close(weight.detach(), torch.ones_like(weight))


def test_a_fused_step_leaves_gradients_alone_on_any_device() -> None:
    check_undoable(SGD([on("meta")], **NESTEROV, fused=True))
