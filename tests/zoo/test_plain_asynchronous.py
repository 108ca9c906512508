"""The asynchronous reference, compared with the plain loop and with hand-written recurrences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from stageline.model.layers import LayerSequence
from stageline.zoo.plain import train_plainly
from stageline.zoo.plain_asynchronous import train_asynchronously, version_of

RATE = 0.1
RULES = ("pipedream", "vertical_sync", "pipedream_2bw")
Weights = list[nn.Parameter]
Versions = Sequence[Sequence[int]]  # for each mini-batch, the versions of its micro-batches


class Multiply(nn.Module):
    """Multiplication by a weight, in double precision like Python's floats."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def value(self) -> float:
        return self.weight.item()


def momentum(weights: Weights) -> Optimizer:
    return SGD(weights, 1e-2, momentum=0.9)


def adam(weights: Weights) -> Optimizer:
    return AdamW(weights, lr=1e-2)


def gradient_descent(weights: Weights) -> Optimizer:
    return SGD(weights, RATE)


def tensors(layers: LayerSequence, optimizer: Optimizer) -> list[Tensor]:
    """Return parameters, buffers and optimizer state, which shows a gradient's last bits."""
    states = optimizer.state_dict()["state"].values()
    of_optimizer = [item for state in states for item in state.values() if item is not None]
    return [*layers.state_dict().values(), *of_optimizer]


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def tied() -> LayerSequence:
    """Return a model with dropout, BatchNorm and a weight in two layers."""
    torch.manual_seed(2)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return LayerSequence.of([first, nn.BatchNorm1d(3), nn.Dropout(0.3), second, nn.Linear(4, 2)])


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return batches; the second has fewer samples than there are micro-batches."""
    torch.manual_seed(3)
    return [(torch.randn(n, 3, 4), torch.randn(n, 3, 2)) for n in (9, 3, 10)]


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_one_stage_is_bit_identical_to_the_plain_loop(
    make_optimizer: Callable[[Weights], Optimizer],
) -> None:
    optimizers: list[Optimizer] = []

    def make(weights: Weights) -> Optimizer:
        optimizers.append(make_optimizer(weights))
        return optimizers[-1]

    ours, plain = tied(), tied()
    options: dict[str, Any] = {"num_microbatches": 4, "seed": 5}
    losses = train_asynchronously(
        ours, mse_loss, make, batches(), balance=[5], rule="pipedream", **options
    )
    theirs = make_optimizer(list(plain.modules.parameters()))
    assert losses == train_plainly(plain, mse_loss, theirs, batches(), **options)
    (mine,) = optimizers
    assert same(tensors(ours, mine), tensors(plain, theirs))


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_2bw_on_a_parabola_follows_its_recurrence(mu: float) -> None:
    """W(t+1) = W(t) - lr · V(t+1), V(t+1) = mu · V(t) + grad f(W(t-1)); f(w) = (3 w - 1)²."""
    model = Multiply(0.7)
    three, one = (torch.full((4, 1), number, dtype=torch.float64) for number in (3.0, 1.0))
    losses = train_asynchronously(
        LayerSequence.of([model]),
        mse_loss,
        lambda weights: SGD(weights, 0.02, momentum=mu),
        [(three, one)] * 8,
        balance=[1],
        num_microbatches=2,
        rule="pipedream_2bw",
        make_scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5),
    )
    before, now, velocity, wanted = 0.7, 0.7, 0.0, []
    for step in range(8):
        wanted.append((3 * before - 1) ** 2)
        velocity = mu * velocity + 6 * (3 * before - 1)
        before, now = now, now - 0.02 * 0.5**step * velocity
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert model.value() == pytest.approx(now, rel=1e-12)


SAMPLES = [(0.5, 1.0), (-1.0, 0.3), (1.5, -0.2), (0.8, 0.9), (-0.4, 1.1), (1.2, 0.1)] * 2


def train_two_stages(minibatches: list[int], **options: Any) -> tuple[float, float]:
    """Train y = a · b · x, with a weight on each stage, on mini-batches of these sizes."""
    first, second = Multiply(0.9), Multiply(-0.6)
    rows = torch.tensor(SAMPLES[: sum(minibatches)], dtype=torch.float64)
    batches = [(part[:, :1], part[:, 1:]) for part in torch.split(rows, minibatches)]
    layers = LayerSequence.of([first, second])
    train_asynchronously(layers, mse_loss, gradient_descent, batches, balance=[1, 1], **options)
    return first.value(), second.value()


def test_pipedream_on_two_stages_follows_its_recurrence() -> None:
    """The first stage uses weights one step old, the last one the latest."""
    old_a, a, b = 0.9, 0.9, -0.6
    for x, y in SAMPLES[:6]:
        slope = 2 * (old_a * b * x - y) * x
        old_a, a, b = a, a - RATE * slope * b, b - RATE * slope * old_a
    found = train_two_stages([1] * 6, num_microbatches=1, rule="pipedream")
    assert found == pytest.approx((a, b), rel=1e-12)


def by_hand(versions_of_a: Versions, versions_of_b: Versions) -> tuple[float, float]:
    """Train the same model with the given versions; a micro-batch has one sample."""
    every_a, every_b, samples = [0.9], [-0.6], iter(SAMPLES)
    for of_a, of_b in zip(versions_of_a, versions_of_b, strict=True):
        slope_of_a = slope_of_b = 0.0
        for a, b in zip(of_a, of_b, strict=True):
            x, y = next(samples)
            slope = 2 * (every_a[a] * every_b[b] * x - y) * x / len(of_a)
            slope_of_a += slope * every_b[b]
            slope_of_b += slope * every_a[a]
        every_a.append(every_a[-1] - RATE * slope_of_a)
        every_b.append(every_b[-1] - RATE * slope_of_b)
    return every_a[-1], every_b[-1]


TWO_STAGES: dict[str, tuple[str, list[int], Versions, Versions]] = {
    "one replica each": (
        "pipedream",
        [1, 1],
        [[0, 0, 0], [0, 1, 1], [1, 2, 2], [2, 3, 3]],
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]],
    ),
    # The first stage's replica of 0, 2, 4 … has run nothing but the backward of 0 when it comes to
    # 4, and still has 2 before it can step. The other has run 1, its last, when it comes to 5.
    "two replicas, then one": (
        "pipedream",
        [2, 1],
        [[0, 0, 0], [0, 0, 1], [1, 1, 2], [2, 2, 3]],
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]],
    ),
    # Now the first stage is two forwards ahead of its backwards. The replicas of the second run
    # each micro-batch forward and backward at once, and step after 2, 1 | 4, 5 | 8, 7 | …
    "one replica, then two": (
        "pipedream",
        [1, 2],
        [[0, 0, 0], [0, 0, 1], [1, 1, 2], [2, 2, 3]],
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]],
    ),
    "vertical sync": (
        "vertical_sync",
        [1, 1],
        [[0, 0, 0], [0, 1, 1], [1, 2, 2], [2, 3, 3]],
        [[0, 0, 0], [0, 1, 1], [1, 2, 2], [2, 3, 3]],
    ),
    "vertical sync with replicas": (
        "vertical_sync",
        [2, 1],
        [[0, 0, 0], [0, 0, 1], [1, 1, 2], [2, 2, 3]],
        [[0, 0, 0], [0, 0, 1], [1, 1, 2], [2, 2, 3]],
    ),
    "2BW with replicas": (
        "pipedream_2bw",
        [2, 1],
        [[0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 2, 2]],
        [[0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 2, 2]],
    ),
}


@pytest.mark.parametrize("case", TWO_STAGES)
def test_gradients_use_the_versions_derived_by_hand(case: str) -> None:
    rule, replicas, of_a, of_b = TWO_STAGES[case]
    found = train_two_stages([3] * 4, num_microbatches=3, rule=rule, replicas=replicas)
    assert found == pytest.approx(by_hand(of_a, of_b), rel=1e-12)


def test_a_short_mini_batch_counts_as_a_full_one() -> None:
    wanted = by_hand([[0, 0, 0], [0], [1, 2, 2]], [[0, 0, 0], [1], [2, 2, 2]])
    found = train_two_stages([3, 1, 3], num_microbatches=3, rule="pipedream")
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_without_replicas_the_delay_of_a_stage_is_its_distance_from_the_last(
    num_stages: int, num_microbatches: int
) -> None:
    for k, stage in product(range(40), range(num_stages)):
        wanted = max(0, (k - (num_stages - 1 - stage)) // num_microbatches)
        found = version_of(k, stage, "pipedream", num_microbatches, [1] * num_stages)
        assert found == wanted


def test_a_replica_steps_only_after_mini_batches_it_took_part_in() -> None:
    """Three take turns at mini-batches of two; each is one forward ahead of its backwards.

    When the second replica reaches 7, it has run 1 and the step of mini-batch 0. It has no part in
    the next mini-batch, 2 and 3, and does not wait for its step.
    """
    found = [version_of(k, 0, "pipedream", 2, [3, 1]) for k in range(12)]
    assert found == [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("replicas", [[1, 1, 1], [3, 1, 2], [2, 2, 1]])
def test_vertical_sync_uses_the_version_of_the_first_stage_everywhere(replicas: list[int]) -> None:
    for k, stage in product(range(40), range(3)):
        wanted = version_of(k, 0, "pipedream", 4, replicas)
        assert version_of(k, stage, "vertical_sync", 4, replicas) == wanted
        assert wanted <= version_of(
            k, stage, "pipedream", 4, replicas
        )  # so the stage already has it


@pytest.mark.parametrize("rule", RULES)
def test_one_replica_per_stage_is_bit_identical_to_no_replicas(rule: str) -> None:
    options = {"num_microbatches": 2, "rule": rule}
    found = train_two_stages([2, 2, 1, 2], replicas=[1, 1], **options)
    assert found == train_two_stages([2, 2, 1, 2], **options)


@pytest.mark.parametrize(("replicas", "total"), [([1], 1.0), ([2], 2.0), ([3], 0.0), ([4], 1.0)])
def test_a_replica_adds_its_own_gradients_before_those_of_others(
    replicas: list[int], total: float
) -> None:
    """The gradients are 1e8, 1, -1e8 and 1. A 1 is lost if it is added to 1e8 in float32."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    inputs = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    train_asynchronously(
        LayerSequence.of([model]),
        lambda output, _: 4 * output.sum(),  # each is a quarter of the mini-batch
        lambda weights: SGD(weights, 1.0),
        [(inputs, inputs)],
        balance=[1],
        num_microbatches=4,
        rule="pipedream",
        replicas=replicas,
    )
    assert -model.weight.item() == total


def test_a_weight_tied_across_stages_is_an_error() -> None:
    with pytest.raises(AssertionError, match="tied across stages"):
        train_asynchronously(
            tied(), mse_loss, adam, [], balance=[2, 3], num_microbatches=4, rule="pipedream"
        )


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="the rule is 'pipedram', but has to be 'pipedream'"):
        version_of(0, 0, "pipedram", 1, [1])
