"""Ranks that are threads on simulated devices: every use of memory is ordered, bits are the same.

`benchmarks/parity.py --streams` has every combination; here is each schedule and each feature.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.runtime.accelerators.watched import batches, chain, watched
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.errors import StageError
from stageline.model import trees
from stageline.schedules.build import schedule_names
from stageline.zoo.cases import CASES, Case, Trained, differences, make_case, pipelined, plainly

FEW = 2  # micro-batches: all schedules on all models take half as long as with four


def one_step(model: str, num_microbatches: int) -> Case:
    """Return a case with one small batch, which is cut unevenly."""

    def few(leaf: Any) -> Any:
        return leaf[: num_microbatches + 1] if isinstance(leaf, Tensor) else leaf

    case = make_case(model)
    return case._replace(batches=(trees.map_leaves(few, case.batches[0]),))


@cache
def plain(model: str, num_microbatches: int = FEW, batch_norm: str = "minibatch") -> Trained:
    return plainly(one_step(model, num_microbatches), num_microbatches, batch_norm=batch_norm)


def on_devices(model: str, num_microbatches: int = FEW, **options: Any) -> Trained:
    options = {"num_ranks": 2, "schedule": "1f1b", "check_streams": True, **options}
    return pipelined(one_step(model, num_microbatches), num_microbatches, **options)


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("schedule", schedule_names(synchronous=True))
def test_all_accesses_of_a_schedule_are_ordered(schedule: str, model: str) -> None:
    count = 4 if schedule == "dualpipe_v" else FEW  # it needs as many on two ranks
    assert differences(on_devices(model, count, schedule=schedule), plain(model, count)) == []


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_ranks": 3, "schedule": "zb_h1", "recompute": "always"},
        {"num_ranks": 3, "schedule": "1f1b", "offload": True, "recompute": "except_last"},
        {"schedule": "zbv", "offload": True},
        {"num_ranks": 3, "schedule": "gpipe", "devices": ["cpu"] * 3},  # all on the same
        {"schedule": "zbv", "devices": ["cpu"] * 2, "offload": True},
        {"schedule": "zbv", "backend": "serial", "offload": True},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_recomputation_offload_and_shared_devices_are_ordered(
    model: str, options: dict[str, Any]
) -> None:
    assert differences(on_devices(model, **options), plain(model)) == []


def test_running_statistics_of_each_micro_batch_are_ordered() -> None:
    found = on_devices("resnet", batch_norm="microbatch", recompute="always", offload=True)
    assert differences(found, plain("resnet", batch_norm="microbatch")) == []


Train = Callable[[sl.Pipeline, nn.Module], None]


def assert_same(train: Train, *, tied: bool = False, **options: Any) -> None:
    """Train with and without devices: no error, and the same weights and gradients."""
    models = []
    for checks in (False, True):
        model = chain(tied=tied)
        with watched(model, checks=checks, **options) as pipe:
            train(pipe, model)
        models.append(model)
    for plain, checked in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain, checked)
        assert (plain.grad is None) == (checked.grad is None)
        assert plain.grad is None or torch.equal(plain.grad, checked.grad)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def steps(pipe: sl.Pipeline, model: nn.Module) -> None:
    optimizer = adamw(model.parameters())
    for inputs, target in batches():
        assert float(pipe.step(inputs, target).loss) > 0
        optimizer.step()


def clipped_steps(pipe: sl.Pipeline, model: nn.Module) -> None:
    optimizer = adamw(model.parameters())
    for inputs, target in batches():
        pipe.step(inputs, target)
        assert float(pipe.clip_grad_norm_(0.01)) > 0.01
        optimizer.step()


def own_loss(pipe: sl.Pipeline, model: nn.Module) -> None:
    optimizer = adamw(model.parameters())
    for given, target in batches():
        inputs = (given * 2).requires_grad_()
        torch.autograd.backward(mse_loss(pipe(inputs), target))
        assert inputs.grad is not None
        assert float(inputs.grad.norm()) > 0
        optimizer.step()
        optimizer.zero_grad()


def evaluations(pipe: sl.Pipeline, model: nn.Module) -> None:
    steps(pipe, model)
    pipe.eval()
    assert pipe(batches()[0][0]).shape == (9, 6)
    pipe.train()
    steps(pipe, model)


def inputs_in_a_graph(pipe: sl.Pipeline, model: nn.Module) -> None:  # noqa: ARG001
    scale = torch.ones(6, requires_grad=True)
    for inputs, target in batches():
        pipe.step(inputs * scale, target)
    assert scale.grad is not None
    assert float(scale.grad.norm()) > 0


def hooked(pipe: sl.Pipeline, model: nn.Module) -> None:
    first = next(model.parameters())
    first.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    steps(pipe, model)


def verified(pipe: sl.Pipeline, model: nn.Module) -> None:
    steps(pipe, model)
    pipe.verify(*batches()[0])


def moved(pipe: sl.Pipeline, model: nn.Module) -> None:
    optimizer = adamw(model.parameters())
    with pipe.trace() as trace:
        pipe.step(*batches()[0])
    # stage 0 has one layer, so that its rank seems to be fast and gets more
    assert pipe.replan(optimizer, [trace.timeline]).moves
    pipe.step(*batches()[1])
    optimizer.step()


def streamed(pipe: sl.Pipeline, model: nn.Module) -> None:  # noqa: ARG001
    for result in pipe.run(batches(6)):
        assert float(result.loss) > 0
        assert all(norm > 0 for norm in result.update_norms.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "train", [steps, clipped_steps, own_loss, evaluations, inputs_in_a_graph, hooked, verified]
)
def test_what_a_caller_does_between_steps_is_ordered(train: Train, *, tied: bool) -> None:
    assert_same(train, tied=tied, schedule="zbv")


def test_a_weight_on_three_ranks_of_one_device_is_ordered() -> None:
    assert_same(steps, tied=True, num_ranks=3, devices=["cpu"] * 3)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_move_to_another_rank_are_ordered(*, tied: bool) -> None:
    model = chain(tied=tied)
    with watched(model, balance=[1, 5]) as pipe:
        moved(pipe, model)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("pipedream", {}),
        ("pipedream_2bw", {}),
        ("1f1b", {}),
        ("zb_h1", {"max_norm": 0.05}),  # clipped after the step
    ],
)
def test_streams_of_mini_batches_are_ordered(schedule: str, options: dict[str, Any]) -> None:
    count = 1 if schedule == "pipedream" else 4
    assert_same(
        streamed,
        schedule=schedule,
        num_microbatches=count,
        optimizer_fn=adamw,
        options=options,
    )


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_streams_with_tied_weights_are_ordered(max_norm: float | None) -> None:
    options = {"max_norm": max_norm}
    assert_same(streamed, tied=True, schedule="zbv", optimizer_fn=adamw, options=options)


def test_fused_and_offloaded_gradients_are_ordered() -> None:
    assert_same(steps, schedule="zbv", options={"accumulate": "fused", "offload": True})


class FailsOnce(nn.Module):
    """Raises at its third call."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            raise ValueError("once")
        return x


def test_a_caller_may_go_on_after_a_rank_has_failed() -> None:
    model = nn.Sequential(*chain(), FailsOnce())
    with watched(model) as pipe:
        optimizer = adamw(model.parameters())
        with pytest.raises(StageError, match="once"):
            pipe.step(*batches()[0])
        optimizer.step()
        optimizer.zero_grad()
        pipe.step(*batches()[1])
        optimizer.step()
