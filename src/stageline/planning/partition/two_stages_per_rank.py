"""Find the best cut where every rank holds two stages: a path of two positions, a step per rank.

    loop, turn at 4    x: 0 → 2 → 4      stages 0 1 of ranks 0 1
                       y: 4 → 5 → 8      stages 2 3 of ranks 0 1
    wave               x: 0 → 2 → 4      stages 0 1 of ranks 0 1
                       y: 8 → 6 → 4      stages 3 2 of ranks 0 1: they meet at any position

A step from (x, y) to (x', y') costs old(x) + old(y) + new(x') + new(y'), the load of its rank. So
the pairs that can be reached within a limit follow from a running minimum along both axes. A loop
has a path for each turn, and for all but a few of them one attempt shows that none is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stageline.planning.partition.one_stage_per_rank import TIE, bisect_minimum
from stageline.planning.partition.prefix_costs import Booleans, Floats, Integers, PrefixCosts

Pair = tuple[int, int]  # positions x and y


def best_two_stages_per_rank(
    prefix: PrefixCosts, boundaries: Sequence[int], largest: float, *, is_wave: bool, low: float
) -> list[int]:
    """Return the best boundaries, given some with their largest load, and a lower bound."""
    best = list(boundaries)
    for grid in [_wave(prefix)] if is_wave else _loops(prefix):
        if grid.attempt(largest * (1 - TIE)) is not None:
            largest = bisect_minimum(low, largest, grid.attempt)
            best = grid.boundaries(grid.path(largest * (1 + TIE)))
    return best


@dataclass(frozen=True, eq=False)
class _PathGrid:
    """Costs by rank and position, from the start of the path on; `goals` are where it may end."""

    old_x: Floats
    old_y: Floats
    new_x: Floats
    new_y: Floats
    goals: tuple[Integers, Integers]
    turn: int | None  # None for a wave

    def attempt(self, limit: float) -> float | None:
        """Return the largest load of some path within the limit, or None if there is none."""
        reachable = self.reachable(limit)
        if not reachable[-1][self.goals].any():
            return None
        path = self.path(limit, reachable)
        return max(self.load(rank, path[rank], path[rank + 1]) for rank in range(len(self.old_x)))

    def load(self, rank: int, old: Pair, new: Pair) -> float:
        before = self.old_x[rank, old[0]] + self.old_y[rank, old[1]]
        return float(before + self.new_x[rank, new[0]] + self.new_y[rank, new[1]])

    def reachable(self, limit: float) -> list[Booleans]:
        """Return, for each rank, the pairs of positions where its stages can end."""
        pairs = np.zeros((self.old_x.shape[1], self.old_y.shape[1]), dtype=np.bool_)
        pairs[0, 0] = True
        reachable = [pairs]
        for old_x, old_y, new_x, new_y in zip(
            self.old_x, self.old_y, self.new_x, self.new_y, strict=True
        ):
            cost = np.where(pairs, old_x[:, None] + old_y, np.inf)
            cost = np.minimum.accumulate(np.minimum.accumulate(cost, axis=0), axis=1)
            pairs = np.zeros_like(pairs)
            pairs[1:, 1:] = cost[:-1, :-1] + new_x[1:, None] + new_y[1:] <= limit
            reachable.append(pairs)
        return reachable

    def path(self, limit: float, reachable: list[Booleans] | None = None) -> list[Pair]:
        """Return a path within the limit, traced back from a goal.

        Each rank is as close as possible to its even share of what is left.
        """
        reachable = self.reachable(limit) if reachable is None else reachable
        hits = np.flatnonzero(reachable[-1][self.goals])
        x, y = (int(positions[hits[len(hits) // 2]]) for positions in self.goals)
        pairs = [(x, y)]
        for rank in range(len(self.old_x) - 1, -1, -1):
            costs = self.old_x[rank, :x, None] + self.old_y[rank, :y]
            costs = costs + (self.new_x[rank, x] + self.new_y[rank, y])
            possible = reachable[rank][:x, :y] & (costs <= limit * (1 + TIE))
            assert possible.any()
            uneven = np.abs(costs - costs[0, 0] / (rank + 1))
            x, y = divmod(int(np.where(possible, uneven, np.inf).argmin()), y)
            pairs.append((x, y))
        return pairs[::-1]

    def boundaries(self, path: Sequence[Pair]) -> list[int]:
        """Return the positions between all stages, in the order of layers."""
        first = [x for x, _ in path]
        if self.turn is None:
            last = self.old_y.shape[1] - 1
            return [*first, *(last - y for _, y in reversed(path[:-1]))]
        return [*first, *(self.turn + y for _, y in path[1:])]


def _wave(prefix: PrefixCosts) -> _PathGrid:
    """Return the grid of a wave, whose second position counts back from the last layer."""
    ranks = prefix.num_stages // 2
    back = (slice(None, ranks - 1, -1), slice(None, None, -1))
    positions = np.arange(prefix.num_layers + 1)
    return _PathGrid(
        -prefix.at_start[:ranks],
        prefix.at_stop[back],
        prefix.at_stop[:ranks],
        -prefix.at_start[back],
        goals=(positions, positions[::-1]),
        turn=None,
    )


def _loops(prefix: PrefixCosts) -> Iterator[_PathGrid]:
    """Yield the grid of each turn of a loop; from the middle on, where the best is likely."""
    ranks, middle = prefix.num_stages // 2, prefix.num_layers // 2
    turns = range(ranks, prefix.num_layers - ranks + 1)
    for turn in sorted(turns, key=lambda turn: abs(turn - middle)):
        before, after = slice(turn + 1), slice(turn, None)
        yield _PathGrid(
            -prefix.at_start[:ranks, before],
            -prefix.at_start[ranks:, after],
            prefix.at_stop[:ranks, before],
            prefix.at_stop[ranks:, after],
            goals=(np.array([turn]), np.array([prefix.num_layers - turn])),
            turn=turn,
        )
