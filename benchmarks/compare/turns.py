"""Contestants take turns, so that all of them have the same weather: times by round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from benchmarks.compare.contestants.contestant import Contestant

WARM_UP = 2  # rounds that do not count


def take_turns(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[float]]:
    """Return each contestant's seconds, one for each round; who begins moves on by one."""
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(-WARM_UP, rounds):
        for contestant in rotated(contestants, number):
            contestant.zero_grad()
            seconds = timed(contestant)
            if number >= 0:
                times[contestant.name].append(seconds)
            contestant.zero_grad()
    return times


def rotated(contestants: Sequence[Contestant], by: int) -> Iterator[Contestant]:
    """Yield all of them, from another first one in each round."""
    count = len(contestants)
    return (contestants[(i + by) % count] for i in range(count))


def timed(contestant: Contestant) -> float:
    """Return the time of a step on the slowest rank, from when all were ready."""
    torch.set_num_threads(contestant.num_threads)
    barrier()
    start = perf_counter()
    contestant.step()
    seconds = perf_counter() - start
    torch.set_num_threads(1)
    return slowest(seconds)


def barrier() -> None:
    """Wait for all processes, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """Return the largest of all processes."""
    if not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def close(contestants: Iterable[Contestant]) -> None:
    """End all of them, in the same order in all processes."""
    for contestant in contestants:
        contestant.close()
