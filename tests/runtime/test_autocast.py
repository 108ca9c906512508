"""Steps within `torch.autocast` have the bits of a plain loop, on every schedule.

The plain loop runs forwards within autocast and backwards outside, as torch advises. Its autocast
has no cache of casts: with one, two uses of a weight share a cast, and their gradients are added in
bfloat16 before they are converted. Ranks in threads would share the cache, and each one that leaves
a block clears it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW

import stageline as sl
from stageline.model.layers import LayerSequence
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import gpt, loss
from stageline.zoo.plain import add_up, cut, even_sizes, forward, untie

LENGTHS = (11, 5)  # samples of each step; with 5, some micro-batches are empty
NUM_MICROBATCHES, SEED = 8, 3
SCHEDULES = sl.schedule_names(synchronous=True)


def layers() -> LayerSequence:
    torch.manual_seed(1)
    return gpt(vocabulary=19, context=6, width=8, heads=2, blocks=2, dropout=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    pairs = [torch.randint(0, 19, (2, n, 6)) for n in LENGTHS]
    return [(pair[0], pair[1]) for pair in pairs]


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@cache
def wanted(*, casts: bool = True) -> dict[str, Tensor]:
    model = layers()
    optimizer = AdamW(model.modules.parameters(), 1e-2)
    doubles = untie(model)
    for step, (x, y) in enumerate(batches()):
        sizes = even_sizes(len(y), NUM_MICROBATCHES)
        for number, (a, b) in enumerate(zip(cut(x, sizes), cut(y, sizes), strict=True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts, cache_enabled=False):
                share = loss(forward(model, a, SEED, step, number), b)
            share.backward(torch.full_like(share, len(b) / len(y)))  # type: ignore[no-untyped-call]
        add_up(doubles)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(**options: Any) -> dict[str, Tensor]:
    model = layers()
    optimizer = AdamW(model.modules.parameters(), 1e-2)
    given = {"num_microbatches": NUM_MICROBATCHES, "seed": SEED} | options
    with sl.Pipeline(model, loss, **grouped(given)) as pipe:
        for x, y in batches():
            with autocast():
                pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        with autocast():
            pipe.verify(*batches()[0])
    return model.state_dict()


@pytest.mark.parametrize("number", range(len(SCHEDULES)), ids=SCHEDULES)
def test_autocast_trains_to_the_bits_of_a_plain_loop(number: int) -> None:
    found = trained(
        schedule=SCHEDULES[number],
        backend=("serial", "threads")[number % 2],
        num_ranks=(2, 3)[number % 2],
        recompute=("never", "always", "except_last")[number % 3],
    )
    assert [name for name, tensor in wanted().items() if not torch.equal(found[name], tensor)] == []


def test_autocast_makes_a_difference() -> None:
    exact = wanted(casts=False)
    assert any(not torch.equal(exact[name], tensor) for name, tensor in wanted().items())


class Exact(nn.Module):
    """Leaves autocast for itself, as layers do that need float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.linear(x.float()))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output.float(), target)


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_backwards_are_outside_of_autocast_wherever_a_rank_runs(
    backend: str, schedule: str
) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Exact(), nn.Linear(16, 16), Exact(), nn.Linear(16, 4))

    torch.manual_seed(1)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    model, plain = make(), make()
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = mean_square(plain(a), b)
        value.backward(torch.tensor(0.25))  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "schedule": schedule}
    with sl.Pipeline(model, mean_square, backend=backend, **options) as pipe:
        with autocast():
            pipe.step(x, y)
            assert torch.is_autocast_enabled("cpu")
            pipe.verify(x, y)
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]  # both are there
