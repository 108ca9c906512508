"""Stageline's threads on emulated accelerators, beside a bare loop of threads and queues.

The bare loop runs the same order on the same layers, and does nothing else: no checks, no names,
no randomness, no failures. Its step is what threads of one interpreter can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from benchmarks.compare.agreement import check_agreement
from benchmarks.compare.contestants import ours
from benchmarks.compare.contestants.contestant import Contestant
from benchmarks.compare.turns import close, take_turns
from benchmarks.compare.workloads import Case, emulated
from torch import Tensor, nn

import stageline as sl

RANKS, MILLISECONDS = (2, 4, 8), 10.0
SCHEDULES = ("gpipe", "1f1b")  # whole backwards, a stage in each rank: what the bare loop can do
BARE = "bare threads"
Link = SimpleQueue[Tensor]


class Ends(NamedTuple):
    """The queues of a rank: values that come and go, and gradients that come and go."""

    values: Link
    next_values: Link
    gradients: Link
    earlier_gradients: Link
    is_last: bool


def names(ranks: Sequence[int], milliseconds: float) -> dict[str, tuple[int, str]]:
    """Return the cells, each with its number of ranks and its schedule."""
    return {
        f"emulated | p={p} F={milliseconds:g} ms | {name}": (p, name)
        for p in ranks
        for name in SCHEDULES
    }


def measure(num_ranks: int, name: str, milliseconds: float, rounds: int) -> dict[str, Any]:
    """Return the times of both, and the simulated time of a step."""
    torch.set_num_threads(1)
    workload = emulated(num_ranks, milliseconds)
    count = workload.num_microbatches
    schedule = sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=count)
    cases = [workload.case(num_ranks, is_quick=False) for _ in range(2)]
    contestants = [bare(cases[0], schedule), ours.threads(cases[1], schedule, [1] * num_ranks)]
    check_agreement(contestants, cases[0])
    times = take_turns(contestants, rounds)
    close(contestants)
    seconds = milliseconds / 1e3
    simulated = sl.simulate(schedule, sl.Costs(seconds, seconds, seconds)).makespan
    return {"times": times, "simulated": simulated}


def bare(case: Case, schedule: sl.Schedule) -> Contestant:
    """Return a loop of one thread for each rank, with queues between neighbours."""
    num_ranks, count = schedule.num_ranks, schedule.num_microbatches
    inputs, targets = case.inputs["x"].chunk(count), case.target.chunk(count)
    pool = ThreadPoolExecutor(num_ranks)

    def loss(output: Tensor, microbatch: int) -> Tensor:
        return case.loss_fn(output, targets[microbatch]) / count

    def step() -> float:
        values: list[Link] = [Link() for _ in range(num_ranks + 1)]
        gradients: list[Link] = [Link() for _ in range(num_ranks + 1)]
        for x in inputs:
            values[0].put(x)

        def run(rank: int) -> list[Tensor]:
            ends = Ends(
                *(values[rank], values[rank + 1], gradients[rank + 1], gradients[rank]),
                is_last=rank == num_ranks - 1,
            )
            module = case.layers.layers[rank].module
            return run_rank(module, schedule.actions[rank], ends, loss)

        return float(sum(sum(losses) for losses in pool.map(run, range(num_ranks))))

    return Contestant(BARE, case.layers, step, lambda loss: loss, pool.shutdown)


def run_rank(
    module: nn.Module,
    actions: Sequence[sl.Action],
    ends: Ends,
    loss: Callable[[Tensor, int], Tensor],
) -> list[Tensor]:
    """Run a rank's actions in order; return the losses, if it is the last one."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    losses = []
    for action in actions:
        if action.kind is sl.Kind.F:
            x = ends.values.get()
            y = module(x)
            if ends.is_last:
                y = loss(y, action.microbatch)
                losses.append(y.detach())
            else:
                ends.next_values.put(y.detach().requires_grad_())
            kept[action.microbatch] = x, y
        else:
            x, y = kept.pop(action.microbatch)
            y.backward(None if ends.is_last else ends.gradients.get())  # type: ignore[no-untyped-call]
            if x.grad is not None:
                ends.earlier_gradients.put(x.grad)
    return losses
