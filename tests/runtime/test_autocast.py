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
from torch import Tensor
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
