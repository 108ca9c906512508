"""Cut layers into stages such that the longest stage is as short as possible, and others even.

    times     4  1  1  1  4
    3 stages  4 │ 1  1  1 │ 4

The shortest possible longest stage is found by bisection: stages filled up to a limit from the left
either hold all layers or not. Filled from the right they give the earliest position of each cut.
Between this and what its predecessor can reach, each cut is put where equal stages would have it.

`planning.partition` also knows memory, transfers and speeds, and needs numpy: here nothing does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

BISECTIONS = 50  # halves a range to less than a rounding error of its first width
SLACK = 1 + 1e-9  # sums of the same times in another order


def even_cut(times: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage; there have to be at least as many as stages.

    >>> even_cut([4, 1, 1, 1, 4], 3), even_cut([1] * 10, 4)
    ((1, 3, 1), (2, 3, 2, 3))
    """
    ends = [0.0, *accumulate(times)]
    limit = _shortest_limit(ends, max(times), num_stages)
    earliest = _earliest_cuts(ends, limit, num_stages)
    cuts = [0]
    for number in range(1, num_stages):
        reached = min(_reach(ends, cuts[-1], limit), len(times) - (num_stages - number))
        wanted = _nearest(ends, ends[-1] * number / num_stages)
        cuts.append(min(max(wanted, earliest[number], cuts[-1] + 1), reached))
    return tuple(stop - start for start, stop in pairwise([*cuts, len(times)]))


def _shortest_limit(ends: Sequence[float], longest: float, num_stages: int) -> float:
    low, high = max(longest, ends[-1] / num_stages) / SLACK, ends[-1]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _earliest_cuts(ends, middle, num_stages)[0] == 0:
            high = middle
        else:
            low = middle
    return high * SLACK


def _earliest_cuts(ends: Sequence[float], limit: float, num_stages: int) -> list[int]:
    """Return the earliest position of each cut; the first is 0 if the stages hold all layers."""
    cuts = [len(ends) - 1]
    for left in reversed(range(num_stages)):
        start = bisect_left(ends, ends[cuts[-1]] - limit * SLACK)
        cuts.append(min(max(start, left), cuts[-1] - 1))
    return cuts[::-1]


def _reach(ends: Sequence[float], start: int, limit: float) -> int:
    """Return the last position at which a stage can end."""
    return max(bisect_right(ends, ends[start] + limit * SLACK) - 1, start + 1)


def _nearest(ends: Sequence[float], time: float) -> int:
    after = bisect_left(ends, time)
    return after - 1 if after and time - ends[after - 1] <= ends[after] - time else after
