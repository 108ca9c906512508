"""The same bits as a plain loop: every schedule, backend, number of ranks, recomputation or none.

The plain loop is written out in `stageline.zoo.plain` and has nothing of the runtime, so a reader
sees what the pipeline is held to. Here is a covering set; `benchmarks/parity.py` has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence
from stageline.pipeline import Pipeline
from stageline.runtime.placement.checks import RECOMPUTE
from stageline.runtime.stage import kept_results
from stageline.schedules.build import schedule_names
from stageline.schedules.schedule import Schedule
from stageline.zoo.cases import (
    BACKENDS,
    CASES,
    RANKS,
    Case,
    Combination,
    Trained,
    differences,
    make_case,
    pipelined,
    plainly,
)


def pairs(row: Iterable[Hashable]) -> set[Any]:
    """Return all pairs of values of a row, each with its position."""
    return set(combinations(enumerate(row), 2))


def covering(factors: Iterable[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Return few rows that contain all pairs of values of different factors."""
    rows = {row: pairs(row) for row in product(*factors)}
    missing, chosen = set[Any]().union(*rows.values()), []
    while missing:
        best = max(rows, key=lambda row: len(rows[row] & missing))
        missing -= rows.pop(best)
        chosen.append(best)
    return chosen


FACTORS = (tuple(CASES), schedule_names(synchronous=True), BACKENDS, RANKS, RECOMPUTE)
COVERING = [Combination(*row) for row in covering(FACTORS)]


@cache
def wanted(model: str, batch_norm: str = "minibatch") -> Trained:
    return plainly(make_case(model), batch_norm=batch_norm)


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert differences(found, expected) == []
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)  # sums are rounded differently


@pytest.mark.parametrize("row", COVERING, ids=lambda row: "-".join(map(str, row)))
def test_five_steps_of_adamw_leave_the_same_bits(
    row: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_results, "LEAST_PRODUCTS_PER_VALUE", 1)  # these models are narrow
    options = row._asdict()
    model = options.pop("model")
    assert_same_bits(pipelined(make_case(model), **options), wanted(model))


def test_the_covering_set_has_any_two_choices_together() -> None:
    together = set[Any]().union(*map(pairs, COVERING))
    for (i, these), (j, those) in combinations(enumerate(FACTORS), 2):
        assert together >= {((i, a), (j, b)) for a in these for b in those}


def chain() -> Case:
    """Twelve layers in nested Sequentials, and batches that do not divide."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 3))
    batches = tuple((torch.randn(19, 8), torch.randn(19, 3)) for _ in range(3))
    return Case(LayerSequence.of(model), mse_loss, batches)


class Noisy(nn.Module):
    """Attention with dropout, and noise that is not from a module of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + 0.01 * torch.randn_like(x)


def noisy() -> Case:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(20, 8), *(Noisy(8) for _ in range(4)), nn.Linear(8, 4))
    batches = tuple((torch.randint(20, (9, 5)), torch.randn(9, 5, 4)) for _ in range(3))
    return Case(LayerSequence.of(model), mse_loss, batches)


def thrice() -> Case:
    """One weight in three layers, whose gradient depends on the order of addition."""
    torch.manual_seed(1)
    first, second, third = (nn.Linear(6, 6) for _ in range(3))
    second.weight = third.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third, nn.Linear(6, 2))
    batches = tuple((torch.randn(9, 6), torch.randn(9, 2)) for _ in range(3))
    return Case(LayerSequence.of(model), mse_loss, batches)


def assert_trains_alike(make: Callable[[], Case], num_microbatches: int, **options: Any) -> None:
    expected = plainly(make(), num_microbatches)
    assert_same_bits(pipelined(make(), num_microbatches, **options), expected)


@pytest.mark.parametrize("num_microbatches", [1, 5, 19, 32])
def test_any_number_of_micro_batches_trains_to_the_same_bits(num_microbatches: int) -> None:
    """19 samples: uneven pieces, and for 32 the last 13 micro-batches are left out."""
    assert_trains_alike(chain, num_microbatches, schedule="zb_h1", num_ranks=3)


def test_an_order_made_by_hand_trains_to_the_same_bits() -> None:
    """A V on two ranks; the backward of micro-batch 1 is split, that of micro-batch 0 is not."""
    schedule = Schedule.from_text(
        "0F0 3F0 3B0 0F1 3F1 3I1 0B0 3W1 0I1 0W1", "1F0 2F0 2B0 1B0 1F1 2F1 2I1 1I1 2W1 1W1"
    )
    assert_trains_alike(chain, 2, schedule=schedule, num_ranks=2)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 1), ("1f1b", 4), ("zbv", 2)])
def test_noise_of_a_layers_own_is_the_same_noise(
    schedule: str, num_ranks: int, recompute: str
) -> None:
    assert_trains_alike(noisy, 4, schedule=schedule, num_ranks=num_ranks, recompute=recompute)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 1), ("1f1b", 3), ("zbv", 3)])
def test_a_weight_in_three_layers_trains_to_the_same_bits(schedule: str, num_ranks: int) -> None:
    assert_trains_alike(thrice, 4, schedule=schedule, num_ranks=num_ranks)


@pytest.mark.parametrize("model", CASES)
def test_recomputation_of_some_stages_changes_no_bit(model: str) -> None:
    modes = ["always", "never", "except_last"]
    found = pipelined(make_case(model), schedule="zb_h1", num_ranks=3, recompute=modes)
    assert_same_bits(found, wanted(model))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 1), ("1f1b", 3), ("zbv", 3)])
def test_batch_norm_of_each_micro_batch_keeps_the_statistics_of_a_plain_loop(
    schedule: str, num_ranks: int, recompute: str
) -> None:
    options: dict[str, Any] = {"num_ranks": num_ranks, "recompute": recompute}
    found = pipelined(make_case("resnet"), schedule=schedule, batch_norm="microbatch", **options)
    assert_same_bits(found, wanted("resnet", "microbatch"))


def test_layers_that_share_a_module_are_refused() -> None:
    shared = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"^layers '0' and '2' contain the same module, a Linear"):
        Pipeline([shared, nn.ReLU(), shared], mse_loss, num_ranks=3, num_microbatches=2)
