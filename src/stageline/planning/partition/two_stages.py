"""The best cut where every rank holds two stages: a walk of two positions, one step a rank.

    loop, turn at 4    x: 0 → 2 → 4      stages 0 1 of ranks 0 1
                       y: 4 → 5 → 8      stages 2 3 of ranks 0 1
    wave               x: 0 → 2 → 4      stages 0 1 of ranks 0 1
                       y: 8 → 6 → 4      stages 3 2 of ranks 0 1: they meet at any turn

A step from (x, y) to (x', y') costs old(x) + old(y) + new(x') + new(y'), the load of its rank. So
what can be reached within a limit is a running minimum along both axes. A loop has a walk for each
turn, and all but a few of them take one look: no better than the best so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stageline.planning.partition.chain import Chain, Flags, Floats, Whole
from stageline.planning.partition.partition import TIE, least

Cell = tuple[int, int]


def improved_on_two_stages(
    chain: Chain, ends: Sequence[int], largest: float, *, is_wave: bool, low: float
) -> list[int]:
    """The best ends, given some with their largest load, and a bound below which none is."""
    best = list(ends)
    for walk in [_wave(chain)] if is_wave else _loops(chain):
        if walk.attempt(largest * (1 - TIE)) is not None:
            largest = least(low, largest, walk.attempt)
            best = walk.ends(walk.path(largest * (1 + TIE)))
    return best


@dataclass(frozen=True, eq=False)
class _Walk:
    """Costs by rank and position, from where the walk begins on; `goals` are where it may end."""

    old_x: Floats
    old_y: Floats
    new_x: Floats
    new_y: Floats
    goals: tuple[Whole, Whole]
    turn: int | None  # None for a wave

    def attempt(self, limit: float) -> float | None:
        """The largest load of some walk within the limit."""
        found = self.reached(limit)
        if not found[-1][self.goals].any():
            return None
        path = self.path(limit, found)
        return max(self.load(rank, path[rank], path[rank + 1]) for rank in range(len(self.old_x)))

    def load(self, rank: int, old: Cell, new: Cell) -> float:
        before = self.old_x[rank, old[0]] + self.old_y[rank, old[1]]
        return float(before + self.new_x[rank, new[0]] + self.new_y[rank, new[1]])

    def reached(self, limit: float) -> list[Flags]:
        """After each rank, the pairs of positions where its stages can end."""
        cells = np.zeros((self.old_x.shape[1], self.old_y.shape[1]), dtype=np.bool_)
        cells[0, 0] = True
        found = [cells]
        for old_x, old_y, new_x, new_y in zip(
            self.old_x, self.old_y, self.new_x, self.new_y, strict=True
        ):
            cost = np.where(cells, old_x[:, None] + old_y, np.inf)
            cost = np.minimum.accumulate(np.minimum.accumulate(cost, axis=0), axis=1)
            cells = np.zeros_like(cells)
            cells[1:, 1:] = cost[:-1, :-1] + new_x[1:, None] + new_y[1:] <= limit
            found.append(cells)
        return found

    def path(self, limit: float, found: list[Flags] | None = None) -> list[Cell]:
        """Back from a goal, each rank as near as can be to its share of what is left."""
        found = self.reached(limit) if found is None else found
        hits = np.flatnonzero(found[-1][self.goals])
        x, y = (int(places[hits[len(hits) // 2]]) for places in self.goals)
        cells = [(x, y)]
        for rank in range(len(self.old_x) - 1, -1, -1):
            costs = self.old_x[rank, :x, None] + self.old_y[rank, :y]
            costs = costs + (self.new_x[rank, x] + self.new_y[rank, y])
            possible = found[rank][:x, :y] & (costs <= limit * (1 + TIE))
            assert possible.any()
            uneven = np.abs(costs - costs[0, 0] / (rank + 1))
            x, y = divmod(int(np.where(possible, uneven, np.inf).argmin()), y)
            cells.append((x, y))
        return cells[::-1]

    def ends(self, path: Sequence[Cell]) -> list[int]:
        first = [x for x, _ in path]
        if self.turn is None:
            last = self.old_y.shape[1] - 1
            return [*first, *(last - y for _, y in reversed(path[:-1]))]
        return [*first, *(self.turn + y for _, y in path[1:])]


def _wave(chain: Chain) -> _Walk:
    """Its second position counts from the last layer back."""
    ranks = chain.num_stages // 2
    back = (slice(None, ranks - 1, -1), slice(None, None, -1))
    places = np.arange(chain.num_layers + 1)
    return _Walk(
        -chain.head[:ranks],
        chain.tail[back],
        chain.tail[:ranks],
        -chain.head[back],
        goals=(places, places[::-1]),
        turn=None,
    )


def _loops(chain: Chain) -> Iterator[_Walk]:
    """Turns in the middle first: the best one is likely there."""
    ranks, middle = chain.num_stages // 2, chain.num_layers // 2
    turns = range(ranks, chain.num_layers - ranks + 1)
    for turn in sorted(turns, key=lambda turn: abs(turn - middle)):
        before, after = slice(turn + 1), slice(turn, None)
        yield _Walk(
            -chain.head[:ranks, before],
            -chain.head[ranks:, after],
            chain.tail[:ranks, before],
            chain.tail[ranks:, after],
            goals=(np.array([turn]), np.array([chain.num_layers - turn])),
            turn=turn,
        )
