"""Clipping without a barrier: the numbers of ordinary clipping, wrong guesses included."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

import stageline as sl
from stageline.zoo.cases import grouped

Batch = tuple[Tensor, Tensor]
MIDDLE = 4
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda weights: SGD(weights, 0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda weights: Adam(weights, 0.01),
    "AdamW": lambda weights: AdamW(weights, 0.01),
}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    parts = (nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.LayerNorm(8))
    return nn.Sequential(*parts, nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def batches() -> list[Batch]:
    """Return batches; the gradients of the middle one are the largest by far."""
    torch.manual_seed(0)
    sizes = [10.0 if number == MIDDLE else 1.0 for number in range(8)]
    return [(torch.randn(16, 4), size * torch.randn(16, 2)) for size in sizes]


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]  # of all gradients, by step
    redone: list[int]  # the steps that were made again


def pipeline(network: nn.Module, schedule: str, backend: str, **options: object) -> sl.Pipeline:
    is_long = sl.build_schedule(schedule, num_ranks=4, num_microbatches=8).num_stages > 4
    return sl.Pipeline(
        network,
        mse_loss,
        num_ranks=2 if is_long else 4,
        num_microbatches=8,
        schedule=schedule,
        backend=backend,
        **grouped(options),
    )


def with_a_barrier(schedule: str, optimizer: str, max_norm: float) -> Outcome:
    """Clip as usual: wait for all gradients, clip, step."""
    network = model()
    pipe = pipeline(network, schedule, "serial")
    stepped = OPTIMIZERS[optimizer](list(network.parameters()))
    scheduler = StepLR(stepped, 4, 0.7)
    norms = []
    for inputs, target in batches():
        pipe.step(inputs, target)
        norms.append(float(pipe.clip_grad_norm_(max_norm)))
        stepped.step()
        stepped.zero_grad()
        scheduler.step()
    return Outcome(network.state_dict(), norms, [])


def streamed(
    schedule: str, optimizer: str, max_norm: float, backend: str, data: list[Batch] | None = None
) -> Outcome:
    network = model()
    pipe = pipeline(
        network,
        schedule,
        backend,
        optimizer_fn=OPTIMIZERS[optimizer],
        scheduler_fn=lambda stepped: StepLR(stepped, 4, 0.7),
        max_norm=max_norm,
    )
    assert not pipe._session.assembly.needs_barriers
    results = list(pipe.run(data or batches()))
    pipe.close()
    redone = [number for number, result in enumerate(results) if result.redone]
    norms = [max(result.update_norms.values()) for result in results]
    return Outcome(network.state_dict(), norms, redone)


def distance(a: Outcome, b: Outcome) -> float:
    return max(float((a.weights[name] - b.weights[name]).abs().max()) for name in a.weights)


def just_below(norms: list[float]) -> float:
    """A limit that only the step in the middle exceeds, and none of its stages by itself."""
    limit = 0.98 * norms[MIDDLE]
    assert all(norm < limit for number, norm in enumerate(norms) if number != MIDDLE)
    return limit


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_below_the_limit_give_the_bits_of_ordinary_clipping(
    optimizer: str, backend: str
) -> None:
    found = streamed("zb_h2", optimizer, 1e3, backend)
    assert found.redone == []
    assert distance(found, with_a_barrier("zb_h2", optimizer, 1e3)) == 0.0


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_in_the_middle_that_had_to_be_clipped_is_taken_back_and_made_again(
    optimizer: str, backend: str
) -> None:
    limit = just_below(with_a_barrier("1f1b", optimizer, 1e9).norms)
    found, wanted = (
        streamed("1f1b", optimizer, limit, backend),
        with_a_barrier("1f1b", optimizer, limit),
    )
    assert found.redone == [MIDDLE]
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
    assert distance(found, wanted) <= 1e-6


@pytest.mark.parametrize("schedule", sl.schedule_names(synchronous=True))
def test_every_synchronous_schedule_repeats_what_it_had_begun(schedule: str) -> None:
    """A limit that many steps exceed; some by one stage alone, whose rank then does not guess."""
    found = streamed(schedule, "SGD", 0.8, "serial")
    wanted = with_a_barrier(schedule, "SGD", 0.8)
    assert len(found.redone) >= 2
    assert distance(found, wanted) <= 1e-6


def test_gradients_that_are_not_finite_leave_the_step_out_on_all_stages() -> None:
    data = batches()
    data[MIDDLE] = (data[MIDDLE][0], data[MIDDLE][1] * torch.inf)
    network = model()
    options = {"optimizer_fn": OPTIMIZERS["AdamW"], "max_norm": 1e3}
    pipe = pipeline(network, "1f1b", "threads", **options)
    results = list(pipe.run(data))
    assert [result.skipped for result in results[MIDDLE - 1 : MIDDLE + 2]] == [
        (),
        (0, 1, 2, 3),
        (),
    ]
    assert all(torch.isfinite(weight).all() for weight in network.parameters())


def test_the_last_step_of_a_stream_is_looked_at_as_well() -> None:
    limit = just_below(with_a_barrier("1f1b", "SGD", 1e9).norms)
    found = streamed("1f1b", "SGD", limit, "serial", batches()[: MIDDLE + 1])
    assert found.redone == [MIDDLE]


def test_an_optimizer_whose_steps_cannot_be_taken_back_waits_for_the_norm() -> None:
    network = model()
    pipe = pipeline(
        network, "1f1b", "serial", optimizer_fn=lambda weights: RMSprop(weights, 0.01), max_norm=0.5
    )
    assert pipe._session.assembly.needs_barriers
    assert pipe.ahead == 0
    assert len(list(pipe.run(batches()))) == 8
