"""Layers that change values in place give the bits of a plain loop, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError, ParityError, StageError
from stageline.model.layers import Layer
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped

Made = list[nn.Module | Layer]


class Scaled(nn.Module):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


class Shifted(nn.Module):
    """Changes a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, :2] += 1
        return x


def behind(first: Callable[[], nn.Module]) -> Callable[[], Made]:
    """A layer that returns its input, followed by one that changes it, in the same stage."""

    def make() -> Made:
        stages: Made = [nn.Linear(4, 4)]
        for change in (nn.ReLU(inplace=True), Scaled(), Shifted()):
            stages.append(nn.Sequential(first(), change, nn.Linear(4, 4)))
        return stages

    return make


class Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


PASSED: dict[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Flatten": nn.Flatten,
    "Dropout(0)": lambda: nn.Dropout(0.0),
    "a view": Passing,
}


BALANCED: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 4, "balance": [1, 3, 3, 3]}


@pytest.mark.parametrize("name", PASSED)
def test_a_change_after_a_layer_that_returns_its_input(name: str) -> None:
    for backend in ("serial", "threads"):
        for recompute in ("never", "always"):
            for schedule in ("1f1b", "zb_h1"):
                torch.manual_seed(0)
                layers = behind(PASSED[name])()
                pipe = Pipeline(
                    layers,
                    mse_loss,
                    schedule=schedule,
                    backend=backend,
                    recompute=recompute,
                    **grouped(BALANCED),
                )
                x, y = torch.randn(8, 4), torch.randn(8, 4)
                for _ in range(2):
                    pipe.verify(x, y)
                    pipe.step(x, y)
                pipe.close()


class More(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def skipping(change: nn.Module) -> Made:
    """A model whose value `kept` is changed by the third layer and read by the last one."""

    class Both(nn.Module):
        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return x + kept

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.change = change

        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return x + torch.as_tensor(self.change(kept))

    return [
        Layer("write", nn.Linear(4, 4), ("x",), ("kept",)),
        Layer("middle", More(), ("kept",), ("x",)),  # it saves nothing, or no loop could do this
        Layer("change", Changing(), ("x", "kept")),
        Layer("read", Both(), ("x", "kept")),
    ]


@pytest.mark.parametrize("change", [Scaled(), Shifted(), nn.ReLU(inplace=True)])
def test_a_change_that_a_later_stage_has_to_see_is_refused(change: nn.Module) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for backend in ("serial", "threads"):
        pipe = Pipeline(
            skipping(change), mse_loss, num_ranks=4, num_microbatches=4, backend=backend
        )
        with pytest.raises(StageError, match="layer 'change' changes 'kept' in place, but a later"):
            pipe.step(x, y)
        with pytest.raises(StageError, match="layer 'change' changes 'kept' in place, but a later"):
            pipe.verify(x, y)


@pytest.mark.parametrize("balance", [[1, 1, 2], [2, 2], [3, 1], [4]])
def test_a_change_is_seen_by_later_readers_of_the_same_stage(balance: list[int]) -> None:
    for recompute in ("never", "always"):
        torch.manual_seed(1)
        pipe = Pipeline(
            skipping(Scaled()),
            mse_loss,
            num_ranks=len(balance),
            num_microbatches=4,
            balance=balance,
            recompute=recompute,
        )
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        for _ in range(2):
            pipe.verify(x, y)
            pipe.step(x, y)


class Twice(nn.Module):
    """Returns two tensors in the same memory."""

    def __init__(self, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(4, 4), second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, self.second(x)


class ChangingFirst(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        pair[0].mul_(3)
        return pair[0].sum(1, keepdim=True) + pair[1]


@pytest.mark.parametrize("second", [lambda x: x, lambda x: x.view(-1, 4), lambda x: x[:, 1:2]])
def test_a_change_of_one_of_two_tensors_that_share_memory_is_refused(
    second: Callable[[Tensor], Tensor],
) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for recompute in ("never", "always"):
        layers: Made = [Twice(second), ChangingFirst(), nn.Linear(4, 4)]
        pipe = Pipeline(layers, mse_loss, num_ranks=3, num_microbatches=4, recompute=recompute)
        with pytest.raises(StageError, match="shares its memory with another tensor"):
            pipe.step(x, y)


def test_slices_that_share_no_element_may_be_changed() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.linear(x)
            return x[:, :4], x[:, 4:]

    class Gated(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0].mul_(0.5) * pair[1].sigmoid()

    torch.manual_seed(2)
    layers: Made = [Halves(), Gated(), nn.Linear(4, 4)]
    pipe = Pipeline(layers, mse_loss, num_ranks=3, num_microbatches=4)
    for _ in range(2):
        pipe.verify(torch.randn(8, 4), torch.randn(8, 4))
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))


def test_a_change_of_a_value_that_has_another_name_is_refused() -> None:
    class Pass(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Sum(nn.Module):
        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return x + kept

    layers: Made = [
        Layer("write", nn.Linear(4, 4), ("x",), ("kept",)),
        Layer("pass", Pass(), ("kept",), ("x",)),
        Layer("change", Scaled()),
        Layer("read", Sum(), ("x", "kept")),
    ]
    pipe = Pipeline(layers, mse_loss, num_ranks=4, num_microbatches=4)
    with pytest.raises(StageError, match="layer 'change' changes 'x' in place, which shares"):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))


class Sometimes(nn.Module):
    """Works in place from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mul_(2) if self.calls > 2 else x * 2


def test_a_layer_that_works_in_place_in_later_micro_batches() -> None:
    """An error only if others use the memory."""
    torch.manual_seed(3)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    layers: Made = [nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4)]
    pipe = Pipeline(layers, mse_loss, num_ranks=3, num_microbatches=4, backend="serial")
    pipe.verify(x, y)
    pipe.step(x, y)
    layers = [nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4)]
    pipe = Pipeline(layers, mse_loss, num_ranks=3, num_microbatches=4, recompute="always")
    with pytest.raises(StageError, match="layer '1' changed its input in place, but did not"):
        pipe.step(x, y)
    for weight in pipe.parameters():
        weight.grad = None
    pipe.verify(x, y)


def masked_loss(output: Tensor, target: Tensor) -> Tensor:
    target[target > 0.5] -= 1
    return mse_loss(output, target)


def test_a_loss_that_changes_its_target_changes_it_once() -> None:
    torch.manual_seed(4)
    x, y = torch.randn(8, 4), torch.randn(8, 4) * 3
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(4)
        layers: Made = [nn.Linear(4, 4), nn.Linear(4, 4)]
        pipe = Pipeline(layers, masked_loss, num_ranks=2, num_microbatches=4, recompute=recompute)
        pipe.verify(x, y)
        target = y.clone()
        pipe.step(x, target)
        found.append([target, *(p.grad for p in pipe.parameters() if p.grad is not None)])
        assert torch.equal(target, torch.where(y > 0.5, y - 1, y))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_that_is_changed_before_its_backward_is_an_error() -> None:
    layers: Made = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for recompute, error in (
        ("never", "modified by an inplace"),
        ("always", "was changed in place"),
    ):
        pipe = Pipeline(layers, mse_loss, num_ranks=2, num_microbatches=2, recompute=recompute)
        x = torch.randn(4, 4)
        output = pipe(x)
        x.mul_(2)
        with pytest.raises((StageError, RuntimeError), match=error):
            output.sum().backward()
        pipe.close()


def test_verify_leaves_no_gradient_behind_and_compares_those_of_the_loss() -> None:
    torch.manual_seed(5)
    outer, scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(outer(x))

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return mse_loss(self.head(output * scale), target)

    loss_fn = Weighted()
    scale.grad = torch.full((4,), 7.0)
    pipe = Pipeline([nn.Linear(4, 4), Closed()], loss_fn, num_ranks=2, num_microbatches=2)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe.verify(x, y)
    assert torch.equal(scale.grad, torch.full((4,), 7.0))
    weights = [*pipe.parameters(), *outer.parameters(), *loss_fn.parameters()]
    assert all(weight.grad is None for weight in weights)

    def cheating(output: Tensor, target: Tensor) -> Tensor:
        in_pipeline = pipe.is_cheating  # type: ignore[attr-defined]
        return mse_loss(output * (scale * 2 if in_pipeline else scale), target)

    pipe = Pipeline([nn.Linear(4, 4)], cheating, num_ranks=1, num_microbatches=2)
    run, pipe.is_cheating = pipe._session.run, False  # type: ignore[attr-defined]

    def noted(minibatch: Any, purpose: Any) -> None:
        pipe.is_cheating = True  # type: ignore[attr-defined]
        run(minibatch, purpose)

    pipe._session.run = noted  # type: ignore[method-assign, assignment]
    with pytest.raises(ParityError):
        pipe.verify(x, y)


def test_verify_names_the_layer_that_fails() -> None:
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(3, 4)], mse_loss, num_ranks=2, num_microbatches=2)
    with pytest.raises(StageError, match="layer '1' failed in the plain loop"):
        pipe.verify(torch.randn(4, 4), torch.randn(4, 4))


def test_a_backward_inside_a_forward_is_refused_at_a_stage_border() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                self.linear(x).square().mean().backward(retain_graph=True)
            return torch.as_tensor(self.linear(x))

    pipe = Pipeline([nn.Linear(4, 4), Inner()], mse_loss, num_ranks=2, num_microbatches=2)
    with pytest.raises((StageError, ModelError), match="continues through the stage's input"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
