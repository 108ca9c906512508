"""Plain loops over micro-batches, and the machine's limit: several of them side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from benchmarks.compare.contestants.contestant import Contestant, cut_batch, nothing, rank
from benchmarks.compare.stages import stage_modules
from benchmarks.compare.workloads import Case
from torch import Tensor

PLAIN, PLAIN_ALL, LIMIT = "plain loop", "plain loop, all threads", "limit"


def plain_step(case: Case, num_microbatches: int, mine: Sequence[int]) -> Callable[[], float]:
    """Return a step over some of the micro-batches that adds their share of the mean's gradient."""
    [module] = stage_modules(case.layers, case.first_input, [len(case.layers)])
    inputs = cut_batch(case.inputs, num_microbatches)
    targets = case.target.chunk(num_microbatches)
    parts = [(list(inputs[i].values()), inputs[i], targets[i]) for i in mine]
    named = list(case.inputs)[1:]

    def step() -> float:
        losses: list[Tensor] = []
        for values, by_name, target in parts:
            output = module(values[0], **{name: by_name[name] for name in named})
            loss = case.loss_fn(output, target) / num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    return step


def plain(case: Case, num_microbatches: int) -> Contestant:
    """Return a loop in the first process, with one thread."""
    step = plain_step(case, num_microbatches, range(num_microbatches))
    return Contestant(PLAIN, case.layers, step if rank() == 0 else nothing, _given)


def plain_with_all_threads(case: Case, num_microbatches: int) -> Contestant:
    """Return a loop in the first process, with a thread for each core."""
    step = plain_step(case, num_microbatches, range(num_microbatches))
    return Contestant(
        PLAIN_ALL,
        case.layers,
        step if rank() == 0 else nothing,
        _given,
        num_threads=os.cpu_count() or 1,
    )


def limit(case: Case, num_microbatches: int) -> Contestant:
    """Return a loop in each process over its part of the micro-batches, independent of the others.

    No pipeline of the same work can be faster: nobody waits, and nothing is sent.
    """
    mine = range(num_microbatches)[rank() :: dist.get_world_size()]
    step = plain_step(case, num_microbatches, mine)
    return Contestant(LIMIT, case.layers, step, is_comparable=False)


def _given(loss: float | None) -> float | None:
    return loss
