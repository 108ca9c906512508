"""Trains with every schedule over ordered channels with random delays, to the bits of a plain loop.

Its arguments: the first seed of the delays, and how many. With each seed, every pipeline makes a
step, or trains on a stream of four mini-batches if it never flushes. It prints the schedules, and
with which seeds something differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.delays import delays
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.runtime.placement.checks import RECOMPUTE
from stageline.zoo.cases import CASES, LENGTHS, NUM_MICROBATCHES, SEED, Case, make_case
from stageline.zoo.plain import train_plainly
from stageline.zoo.plain_asynchronous import train_asynchronously

BALANCES = {2: [3, 5], 3: [2, 4, 2], 4: [2, 2, 2, 2]}  # by number of ranks


class Beside(nn.Module):
    """Write a value that nobody uses but for its shape, so that it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x.detach())


class Sized(nn.Module):
    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return x * beside.shape[1]


class Select(nn.Module):
    """How much it passes on depends on data."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x[x.sum(1) > 0], len(x)


class Fill(nn.Module):
    def forward(self, rows: Tensor, length: int) -> Tensor:
        return rows.new_ones(length, 6) * (rows.sum() + 1)


class Turn(nn.Module):
    """Pass on a transposed tensor, one that is repeated, and a column: dense, and not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.tanh().t(), x.mean(0, keepdim=True).expand_as(x), x[:, 2:3]


class Join(nn.Module):
    def forward(self, turned: Tensor, repeated: Tensor, column: Tensor) -> Tensor:
        return turned.t() @ torch.ones(6, 6) + repeated * column


def odd_case() -> Case:
    """Values in all sorts of memory, without gradients, and of sizes that depend on data."""
    torch.manual_seed(2)
    layers = sl.LayerSequence(
        (
            sl.Layer("in", nn.Linear(6, 6)),
            sl.Layer("beside", Beside(), writes=("x", "beside")),
            sl.Layer("norm", nn.LayerNorm(6)),
            sl.Layer("sized", Sized(), ("x", "beside")),
            sl.Layer("turn", Turn(), writes=("turned", "repeated", "column")),
            sl.Layer("join", Join(), ("turned", "repeated", "column")),
            sl.Layer("middle", nn.Linear(6, 6)),
            sl.Layer("select", Select(), writes=("rows", "length")),
            sl.Layer("fill", Fill(), ("rows", "length")),
            sl.Layer("out", nn.Linear(6, 3)),
        )
    )
    batches = [(torch.randn(length, 6), torch.randn(length, 3)) for length in LENGTHS]
    return Case(layers, mse_loss, tuple(batches))


def case_of(name: str) -> Case:
    return odd_case() if name == "odd" else make_case(name)


def optimizer_of(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, 1e-2)


class Wanted:
    """The weights and losses of a plain loop, after each of many steps."""

    def __init__(self, name: str, steps: int) -> None:
        case = case_of(name)
        self.states: list[dict[str, Tensor]] = []

        def batches() -> Iterator[Any]:
            for number, batch in enumerate(islice(cycle(case.batches), steps + 1)):
                if number:  # when the next batch is asked for, a step is complete
                    state = case.layers.state_dict()
                    self.states.append({key: tensor.clone() for key, tensor in state.items()})
                if number < steps:
                    yield batch

        self.losses = train_plainly(
            case.layers,
            case.loss_fn,
            optimizer_of(case.layers.modules.parameters()),
            batches(),
            num_microbatches=NUM_MICROBATCHES,
            seed=SEED,
        )


def differing(name: str, wanted: Wanted, seeds: range, **options: Any) -> list[int]:
    """Return the seeds with which a pipeline's steps lead to other bits."""
    case = case_of(name)
    pipe = sl.Pipeline(
        case.layers,
        case.loss_fn,
        num_ranks=dist.get_world_size(),
        num_microbatches=NUM_MICROBATCHES,
        options=sl.Options(seed=SEED, check_streams=True),
        **options,
    )
    # a rank may have no weights, but an optimizer must
    optimizer = optimizer_of([*pipe.parameters(), nn.Parameter(torch.zeros(1))])
    found = []
    pairs = zip(seeds, cycle(case.batches), wanted.states, wanted.losses, strict=False)
    for seed, (inputs, target), state, loss in pairs:
        with delays(seed):
            result = pipe.step(inputs, target)
        optimizer.step()
        optimizer.zero_grad()
        is_equal = holds_bits(pipe.state_dict(), state)
        if not (is_equal and abs(float(result.loss) - loss) < 1e-5 * abs(loss)):
            found.append(seed)
    pipe.close()
    return found


def holds_bits(own: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether this rank's weights have the wanted bits, and all ranks together have all weights.

    A rank may have none: on 4 ranks ZB-V gives the last one `sized` and `turn` of the odd case.
    """
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(own))
    assert {name for each in names for name in each} == set(wanted)
    return all(torch.equal(tensor, wanted[key]) for key, tensor in own.items())


def chain_of_layers() -> sl.LayerSequence:
    torch.manual_seed(4)
    pairs = [(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return sl.LayerSequence.of([layer for pair in pairs for layer in pair])


def plain_sgd(weights: Any) -> torch.optim.Optimizer:
    """Return an optimizer without a state, so that a stream goes on where the last one ended."""
    return torch.optim.SGD(weights, 0.05)


def differing_streams(rule: str, seeds: range) -> list[int]:
    """Return the seeds with which streams lead to other bits."""
    num_ranks = dist.get_world_size()
    shared: dict[str, Any] = {"balance": BALANCES[num_ranks]}
    shared["num_microbatches"] = num_ranks if rule == "pipedream_2bw" else 1
    batches = [(torch.randn(length, 6), torch.randn(length, 6)) for length in (8, 7, 8, 8)]
    wanted, found = chain_of_layers(), list[int]()
    pipe = sl.Pipeline(
        chain_of_layers(),
        mse_loss,
        num_ranks=num_ranks,
        schedule=rule,
        optimizer_fn=plain_sgd,
        options=sl.Options(seed=SEED, check_streams=True),
        **shared,
    )
    for seed in seeds:
        with delays(seed):
            for _ in pipe.run(batches):
                pass
        train_asynchronously(wanted, mse_loss, plain_sgd, batches, rule=rule, **shared)
        if not holds_bits(pipe.state_dict(), wanted.state_dict()):
            found.append(seed)
    pipe.close()
    return found


def schedules(num_ranks: int) -> Iterator[str]:
    for name in sl.schedule_names(synchronous=True):
        with suppress(sl.ScheduleError):
            sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
            yield name


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first, count = map(int, sys.argv[1:])
    seeds = range(first, first + count)
    names = [*CASES, "odd"]
    wanted = {name: Wanted(name, count) for name in names}
    for number, schedule in enumerate(schedules(dist.get_world_size())):
        name = names[(number + first // count) % len(names)]
        options = {"schedule": schedule, "recompute": RECOMPUTE[number % 3]}
        found = differing(name, wanted[name], seeds, **options)
        print(f"{schedule}: {len(seeds)} seeds, differs with {found}")
    torch.manual_seed(5)
    for rule in ("pipedream", "pipedream_2bw"):
        found = differing_streams(rule, seeds)
        print(f"{rule}: {len(seeds)} seeds, differs with {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
