"""How fast any schedule could possibly be: proven lower bounds on the makespan and the longest span.

All orders of F, I and W on a given placement are covered, with at most `limits[rank]` activations.
Write a for the lowest and b for the highest stage of a rank. Its first action is an F of a, its last
I is of a, its first I is of b and its last F is of b, because a micro-batch meets the stages of a
rank from a up to b and back. From this follow, for every rank:

  fill    from its first F to its first I a micro-batch travels from a to the last stage and back to
          b. Meanwhile the rank has only forwards to run, as many as its memory takes.
  drain   from its last F to its last I a micro-batch travels from b to the last stage and back to a.
          Meanwhile the rank has only I and W to run, of no more micro-batches than it holds.
  active  from its first F to its last I it runs all F and all I, and all those W whose retained
          activations would not fit in its memory together; and it idles in fill and drain.
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
from stageline.schedules.placement import Placement
from stageline.schedules.times import Times


class Bounds(NamedTuple):
    """No makespan, and no longest rank span, is smaller than these."""

    makespan: float
    span: float


def lower_bounds(
    placement: Placement, num_microbatches: int, costs: Costs, limits: Sequence[float]
) -> Bounds:
    way = _Way.through(placement, costs)
    through, bounds = 0.0, []
    for rank in sorted(range(len(limits)), key=placement.index, reverse=True):
        demand = _demand(way, rank, num_microbatches, limits[rank])
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
        sizes = (costs.per_stage(name, n) for name in ("activation", "retained"))
        ups = (forward[s] + times.whole_way(s, s + 1) for s in range(n - 1))
        downs = (inputs[s] + times.whole_way(s + 1, s) for s in range(n - 1))
        heads, tails = (list(accumulate(hops, initial=0.0)) for hops in (ups, downs))
        return _Way(placement, forward, inputs, weights, *sizes, heads, tails)

    def fill(self, lowest: int, highest: int) -> float:
        """From the start of F on the lowest stage to the start of I on the highest."""
        turn = self.forward[-1] + self.inputs[-1] - self.inputs[highest]
        return self.heads[-1] - self.heads[lowest] + turn + self.tails[-1] - self.tails[highest]

    def drain(self, lowest: int, highest: int) -> float:
        """From the end of F on the highest stage to the end of I on the lowest."""
        turn = self.forward[-1] - self.forward[highest] + self.inputs[-1]
        return self.heads[-1] - self.heads[highest] + turn + self.tails[-1] - self.tails[lowest]


class _Demand(NamedTuple):
    lowest: int  # stage of the rank
    active: float  # least time from its first F to its last I
    alone: float  # least span, of its own work and idling


def _demand(way: _Way, rank: int, num_microbatches: int, limit: float) -> _Demand:
    stages = [stage for stage, home in enumerate(way.placement) if home == rank]
    lowest, highest = stages[0], stages[-1]

    def most(sizes: tuple[float, ...], *values: tuple[float, ...]) -> list[_Item]:
        return [_Item(sizes[s], sum(v[s] for v in values), num_microbatches) for s in stages]

    to_weights = most(way.retained, way.weights)
    to_finish = most(way.activation, way.inputs, way.weights) + to_weights
    fill = _excess(way.fill(lowest, highest), most(way.activation, way.forward), limit)
    drain = way.drain(lowest, highest)
    drain_alone = _excess(drain + way.weights[lowest], to_finish, limit)
    spilled = max(0.0, sum(w.value * w.count for w in to_weights) - _most_value(to_weights, limit))
    drain_active = max(
        spilled + _excess(drain, to_finish, limit),
        _excess(drain, most(way.activation, way.inputs), limit),
    )
    holds_all = limit >= num_microbatches * sum(way.activation[s] for s in stages)
    both = max if holds_all else _sum  # if all F may precede the first I, the two may be one
    passes = num_microbatches * sum(way.forward[s] + way.inputs[s] for s in stages)
    work = passes + num_microbatches * sum(way.weights[s] for s in stages)
    return _Demand(lowest, passes + both(fill, drain_active), work + both(fill, drain_alone))


def _sum(a: float, b: float) -> float:
    return a + b


class _Item(NamedTuple):
    """Work that needs something held in memory."""

    size: float
    value: float
    count: int


def _excess(time: float, items: list[_Item], limit: float) -> float:
    """The part of a time that cannot be filled with work whose data fit in memory together."""
    return max(0.0, time - _most_value(items, limit))


def _most_value(items: list[_Item], limit: float) -> float:
    """The most work that fits, parts allowed: an upper bound for whole ones."""
    total, room = 0.0, limit * (1 + 1e-12)
    for size, value, count in sorted(items, key=lambda i: i.value / i.size if i.size else inf)[::-1]:
        share = min(1.0, room / (size * count)) if size else 1.0
        total += share * value * count
        room -= share * size * count
    return total
