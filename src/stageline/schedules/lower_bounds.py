"""Compute proven lower bounds on the makespan and on the longest rank span of any schedule.

The bounds hold for all orders of F, I and W on a given placement that keep at most `limits[rank]`
activations. (Orders in which micro-batches do not ascend are no better: renumber the k-th F, I and
W of each stage as those of micro-batch k, and all waiting and all memory stay the same.)
Let a be the lowest and b the highest stage of a rank. Its first action is an F of a, its last F is
of b, its first I is of b and its last I is of a, because a micro-batch passes through a rank's
stages from a to b and back. It follows for every rank:

  fill    from its first F to its first I a micro-batch travels from a to the last stage and back to
          b. Meanwhile the rank has only forwards to run, as many as fit in its memory, or idles.
  drain   from its last F to its last I a micro-batch travels from b to the last stage and on to a.
  active  from its first F to its last I: up to the last F it runs all F, and all I and W but those
          whose data its memory can hold at that moment; then it drains. And in any case it runs all
          F, all I, and the W whose data its memory cannot hold at the last I. And in this time its
          memory holds every activation for its lifetime, from F to the last stage and back to I.
  span    of rank q, for every rank r further down: q's first F travels to r, r is active, r's last
          I travels back to q, and W follows. And no span is shorter than its work and idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from stageline.costs import Costs
from stageline.schedules.action import Kind
from stageline.schedules.action_times import ActionTimes
from stageline.schedules.placement import Placement, stages_by_rank

ROUNDING = 1 + 1e-9  # a peak is a sum of sizes, and may differ from their product by rounding


class Bounds(NamedTuple):
    """Lower bounds on the makespan and on the longest rank span."""

    makespan: float
    span: float


def lower_bounds(
    placement: Placement, num_microbatches: int, costs: Costs, limits: Sequence[float]
) -> Bounds:
    """Return the bounds for all orders that keep at most `limits[rank]` activations."""
    path = _MicrobatchPath.through(placement, costs)
    through, bounds = 0.0, []
    stages = stages_by_rank(placement, len(limits))
    for rank in sorted(range(len(limits)), key=lambda rank: stages[rank][0], reverse=True):
        bound = _rank_bounds(path, stages[rank], num_microbatches, limits[rank])
        head, tail = path.heads[bound.lowest], path.tails[bound.lowest]
        through = max(through, head + bound.active + tail)
        span = max(bound.alone, through - head - tail + path.weights[bound.lowest])
        bounds.append((head + span, span))
    return Bounds(max(makespan for makespan, _ in bounds), max(span for _, span in bounds))


def reached_or_bound(bound: float, reached: float) -> float:
    """Return the bound, or exactly the value that was reached if they differ only by rounding."""
    return reached if abs(bound - reached) <= 1e-9 * reached else bound


@dataclass(frozen=True)
class _MicrobatchPath:
    """The times and sizes on the path of a micro-batch through all stages and back."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    activation: tuple[float, ...]
    retained: tuple[float, ...]
    heads: list[float]  # from the start of F on stage 0 to the start of F on a stage
    tails: list[float]  # from the end of I on a stage to the end of I on stage 0

    @staticmethod
    def through(placement: Placement, costs: Costs) -> _MicrobatchPath:
        times, n = ActionTimes(costs, placement), len(placement)
        forward, inputs, weights = (times.durations[kind] for kind in (Kind.F, Kind.I, Kind.W))
        activation, retained = (costs.per_stage(name, n) for name in ("activation", "retained"))
        ups = (forward[s] + times.transfer_time(s, s + 1) for s in range(n - 1))
        # a stage recomputes while the gradient is still on its way to it
        downs = (inputs[s] - times.lead(s) + times.transfer_time(s + 1, s) for s in range(n - 1))
        heads, tails = (list(accumulate(hops, initial=0.0)) for hops in (ups, downs))
        return _MicrobatchPath(forward, inputs, weights, activation, retained, heads, tails)

    def fill(self, lowest: int, highest: int) -> float:
        """Return the time from F on the lowest stage to I on the highest, start to start."""
        turn = self.forward[-1] + self.inputs[-1] - self.inputs[highest]
        return self.heads[-1] - self.heads[lowest] + turn + self.tails[-1] - self.tails[highest]

    def lifetime(self, stage: int) -> float:
        """Return the least time from the start of F on a stage to the end of I on it."""
        return self.fill(stage, stage) + self.inputs[stage]

    def drain(self, lowest: int, highest: int) -> float:
        """Return the time from F on the highest stage to I on the lowest, end to end."""
        turn = self.forward[-1] - self.forward[highest] + self.inputs[-1]
        return self.heads[-1] - self.heads[highest] + turn + self.tails[-1] - self.tails[lowest]


class _RankBounds(NamedTuple):
    """Lower bounds for one rank."""

    lowest: int  # the lowest stage of the rank
    active: float  # from its first F to its last I
    alone: float  # its span, from its own work and idle time


def _rank_bounds(
    path: _MicrobatchPath, stages: tuple[int, ...], num_microbatches: int, limit: float
) -> _RankBounds:
    lowest, highest = stages[0], stages[-1]

    def items(sizes: tuple[float, ...], *values: tuple[float, ...]) -> list[_Work]:
        return [_Work(sizes[s], sum(v[s] for v in values), num_microbatches) for s in stages]

    forwards = items(path.activation, path.forward)
    unfinished = items(path.activation, path.inputs, path.weights)
    weights = items(path.retained, path.weights)
    idle = max(0.0, path.fill(lowest, highest) - _most_work(forwards, limit))
    drain = path.drain(lowest, highest)
    before_last_forward = (
        _total_time(forwards)
        + max(0.0, _total_time(unfinished) - _most_work(unfinished + weights, limit))
        + (0.0 if limit * ROUNDING >= _total_size(forwards) else idle)  # all F may precede an I
    )
    before_last_input = (
        _total_time(items(path.activation, path.forward, path.inputs))
        + max(0.0, _total_time(weights) - _most_work(weights, limit))
        + idle
    )
    lifetimes = sum(path.activation[s] * path.lifetime(s) for s in stages) * num_microbatches
    by_memory = lifetimes / limit if limit else 0.0
    active = max(before_last_forward + drain, before_last_input, by_memory)
    work = _total_time(forwards) + _total_time(unfinished)
    return _RankBounds(lowest, active, max(work + idle, active + path.weights[lowest]))


class _Work(NamedTuple):
    """Work that is done `repeats` times and holds `size` in memory each time."""

    size: float
    time: float
    repeats: int


def _total_time(items: list[_Work]) -> float:
    return sum(item.time * item.repeats for item in items)


def _total_size(items: list[_Work]) -> float:
    return sum(item.size * item.repeats for item in items)


def _most_work(items: list[_Work], limit: float) -> float:
    """Return the most work whose data fit in memory together, as a fractional knapsack.

    Fractions of items count, so the result is never too small.
    """
    total, free = 0.0, limit * ROUNDING
    for size, time, repeats in sorted(items, key=_density, reverse=True):
        share = min(1.0, free / (size * repeats)) if size else 1.0
        total += share * time * repeats
        free -= share * size * repeats
    return total


def _density(item: _Work) -> float:
    return item.time / item.size if item.size else inf
