"""How fast any schedule can possibly be: proven lower bounds on makespan and longest span.

All orders of F, I and W on a given placement are covered, with at most `limits[rank]` activations.
(Orders in which micro-batches do not ascend are no better: call the k-th F, I and W of each stage
those of micro-batch k, and every wait and every level of memory stays as it is.)
Write a for the lowest and b for the highest stage of a rank. Its first action is an F of a, its
last F is of b, its first I is of b and its last I is of a, because a micro-batch meets a rank's
stages from a up to b and back. From this follow, for every rank:

  fill    from its first F to its first I a micro-batch travels from a to the last stage and back to
          b. Meanwhile the rank has only forwards to run, as many as its memory takes, or idles.
  drain   from its last F to its last I a micro-batch travels from b to the last stage and on to a.
  active  from its first F to its last I: up to the last F it runs all F, and all I and W but those
          whose data its memory can hold at that moment; then it drains. And in any case it runs all
          F, all I, and the W whose data its memory cannot hold at the last I. And in this time its
          memory holds every activation for its whole life, from F to the last stage and back to I.
  span    of rank q, for every rank r further down: q's first F travels to r, r is active, r's last
          I travels back to q, and W follows. And no span is shorter than its work and its idling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from stageline.costs import Costs
from stageline.schedules.action import Kind
from stageline.schedules.placement import Placement, stages_by_rank
from stageline.schedules.times import Times

ROUNDING = 1 + 1e-9  # a peak may be a sum of sizes, and fall short of their product by a digit


class Bounds(NamedTuple):
    """No makespan, and no longest rank span, is smaller than these."""

    makespan: float
    span: float


def lower_bounds(
    placement: Placement, num_microbatches: int, costs: Costs, limits: Sequence[float]
) -> Bounds:
    way = _Way.through(placement, costs)
    through, bounds = 0.0, []
    stages = stages_by_rank(placement, len(limits))
    for rank in sorted(range(len(limits)), key=lambda rank: stages[rank][0], reverse=True):
        demand = _demand(way, stages[rank], num_microbatches, limits[rank])
        head, tail = way.heads[demand.lowest], way.tails[demand.lowest]
        through = max(through, head + demand.active + tail)
        span = max(demand.alone, through - head - tail + way.weights[demand.lowest])
        bounds.append((head + span, span))
    return Bounds(max(makespan for makespan, _ in bounds), max(span for _, span in bounds))


@dataclass(frozen=True)
class _Way:
    """What a micro-batch meets on its way through all stages and back."""

    placement: Placement
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    activation: tuple[float, ...]
    retained: tuple[float, ...]
    heads: list[float]  # from the start of F on stage 0 to the start of F on a stage
    tails: list[float]  # from the end of I on a stage to the end of I on stage 0

    @staticmethod
    def through(placement: Placement, costs: Costs) -> _Way:
        times, n = Times(costs, placement), len(placement)
        forward, inputs, weights = (times.durations[kind] for kind in (Kind.F, Kind.I, Kind.W))
        activation, retained = (costs.per_stage(name, n) for name in ("activation", "retained"))
        ups = (forward[s] + times.whole_way(s, s + 1) for s in range(n - 1))
        downs = (inputs[s] + times.whole_way(s + 1, s) for s in range(n - 1))
        heads, tails = (list(accumulate(hops, initial=0.0)) for hops in (ups, downs))
        return _Way(placement, forward, inputs, weights, activation, retained, heads, tails)

    def fill(self, lowest: int, highest: int) -> float:
        """From the start of F on the lowest stage to the start of I on the highest."""
        turn = self.forward[-1] + self.inputs[-1] - self.inputs[highest]
        return self.heads[-1] - self.heads[lowest] + turn + self.tails[-1] - self.tails[highest]

    def life(self, stage: int) -> float:
        """From the start of F on a stage to the end of I on it, if nothing is in the way."""
        return self.fill(stage, stage) + self.inputs[stage]

    def drain(self, lowest: int, highest: int) -> float:
        """From the end of F on the highest stage to the end of I on the lowest."""
        turn = self.forward[-1] - self.forward[highest] + self.inputs[-1]
        return self.heads[-1] - self.heads[highest] + turn + self.tails[-1] - self.tails[lowest]


class _Demand(NamedTuple):
    lowest: int  # stage of the rank
    active: float  # least time from its first F to its last I
    alone: float  # least span, of its own work and idling


def _demand(way: _Way, stages: tuple[int, ...], num_microbatches: int, limit: float) -> _Demand:
    lowest, highest = stages[0], stages[-1]

    def items(sizes: tuple[float, ...], *values: tuple[float, ...]) -> list[_Item]:
        return [_Item(sizes[s], sum(v[s] for v in values), num_microbatches) for s in stages]

    forwards = items(way.activation, way.forward)
    unfinished = items(way.activation, way.inputs, way.weights)
    weights = items(way.retained, way.weights)
    idle = max(0.0, way.fill(lowest, highest) - _most_work(forwards, limit))
    drain = way.drain(lowest, highest)
    before_last_forward = (
        _all_work(forwards)
        + max(0.0, _all_work(unfinished) - _most_work(unfinished + weights, limit))
        + (0.0 if limit * ROUNDING >= _all_memory(forwards) else idle)  # all F may precede an I
    )
    before_last_input = (
        _all_work(items(way.activation, way.forward, way.inputs))
        + max(0.0, _all_work(weights) - _most_work(weights, limit))
        + idle
    )
    lives = sum(way.activation[s] * way.life(s) for s in stages) * num_microbatches
    active = max(before_last_forward + drain, before_last_input, lives / limit if limit else 0.0)
    work = _all_work(forwards) + _all_work(unfinished)
    return _Demand(lowest, active, max(work + idle, active + way.weights[lowest]))


class _Item(NamedTuple):
    """Work that needs something held in memory, so often."""

    size: float
    work: float
    times: int


def _all_work(items: list[_Item]) -> float:
    return sum(item.work * item.times for item in items)


def _all_memory(items: list[_Item]) -> float:
    return sum(item.size * item.times for item in items)


def _most_work(items: list[_Item], limit: float) -> float:
    """The most work whose data fit together; parts of it count, so it is never too little."""
    total, room = 0.0, limit * ROUNDING
    for size, work, times in sorted(items, key=_density, reverse=True):
        share = min(1.0, room / (size * times)) if size else 1.0
        total += share * work * times
        room -= share * size * times
    return total


def _density(item: _Item) -> float:
    return item.work / item.size if item.size else inf
