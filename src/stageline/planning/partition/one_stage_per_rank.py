"""Cut layers into stages that are each on a rank of their own: minimize the costliest stage.

    costs      4  1  1  1  4
    3 stages   4 │ 1  1  1 │ 4        balance (1, 3, 1), bottleneck 4

Of all cuts with the smallest bottleneck the most even one is chosen. Whether a bottleneck is
possible follows from the positions where the first 1, 2, 3 … stages can end if none costs more: one
running maximum per stage. The smallest possible bottleneck is found by bisection. Greedy packing
would be wrong here: a longer stage may be cheaper, if the cut after it transfers less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stageline.errors import PlanError
from stageline.planning.partition.prefix_costs import (
    Booleans,
    FittingStarts,
    Floats,
    Integers,
    PrefixCosts,
    StageFits,
    first_fits,
    prefix_costs,
)

TIE = 1e-12  # relative; costs that differ by less are equal: rounding is about 1e-13 of a stage
NEAR = 1e-6  # relative; so close to the minimum few other costs are left in between
MAX_STEPS = 5e7  # stages × layers × starts tried to make stages even; about half a second


def split_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    transfers: Sequence[float] | None = None,
    fits: StageFits | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each stage such that the costliest stage costs the least.

    A stage costs the sum of its layers, divided by the speed of its device, plus the transfers at
    both of its ends; `transfers[i]` is between layers i and i + 1. `fits(start, stop, stage)` says
    whether a stage has the memory for a run of layers; part of a run that fits must also fit. Of
    all such cuts the one with the smallest sum of squares is returned, unless there are too many.

    >>> split_layers([4, 1, 1, 1, 4], 3)
    (1, 3, 1)
    >>> split_layers([4, 1, 1, 1, 4], 2, transfers=[0, 9, 9, 0])
    (1, 4)
    """
    prefix = prefix_costs(costs, num_stages, transfers=transfers, speeds=speeds)
    return balance_of(best_boundaries(prefix, fits))


def balance_of(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    return tuple(stop - start for start, stop in pairwise(boundaries))


def best_boundaries(prefix: PrefixCosts, fits: StageFits | None = None) -> list[int]:
    """Return the positions between the stages of the best cut, with 0 and the last position."""
    unlimited = least_bottleneck(prefix)
    boundaries = _even_boundaries(prefix, unlimited)
    if fits is None or all(fits(*run, stage) for stage, run in enumerate(pairwise(boundaries))):
        return boundaries  # the best cut without limits is within them, so it is the best with them
    prefix = replace(prefix, first_fit=first_fits(fits, prefix.num_layers, prefix.num_stages))
    return _even_boundaries(prefix, least_bottleneck(prefix, low=unlimited * (1 - TIE)))


def least_variance_boundaries(prefix: PrefixCosts, boundaries: list[int]) -> list[int]:
    """Return the cut whose stages' costs vary least, given any cut as a first bound.

    The sum of costs is the same for all cuts, so the least sum of squares has the least variance. A
    stage that is further from the mean than all stages of the given cut together cannot be part of
    a better one: that bounds the stages to try.
    """
    costs = np.array(prefix.stage_costs(boundaries))
    limit = (costs.mean() + np.sqrt(((costs - costs.mean()) ** 2).sum())) * (1 + TIE)
    return _most_even(prefix, limit, _max_layers(prefix, limit))


def least_bottleneck(prefix: PrefixCosts, low: float = 0.0) -> float:
    """Return the smallest cost that no stage has to exceed; `low` is a lower bound."""

    def attempt(bottleneck: float) -> float | None:
        reachable = reachable_boundaries(prefix, bottleneck)
        if not reachable[-1][-1]:
            return None
        return prefix.bottleneck(_trace_back(prefix, bottleneck, reachable))

    return bisect_minimum(low, _possible_bottleneck(prefix), attempt)


def bisect_minimum(low: float, high: float, attempt: Callable[[float], float | None]) -> float:
    """Return the smallest possible number between a lower bound and a number that is possible.

    `attempt(limit)` returns a possible number within a limit, or None. Near the minimum, every
    other attempt asks only whether the best so far is the minimum, which halves their number. The
    result is exact up to a tie.
    """
    just_below = False
    while high - low > TIE * high:
        just_below = high - low < NEAR * high and not just_below
        middle = high * (1 - TIE) if just_below else (low + high) / 2
        if not low < middle < high:  # there is no float in between
            break
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            high = min(middle, found)
    return high


def _possible_bottleneck(prefix: PrefixCosts) -> float:
    """Return the bottleneck of some cut, or raise `PlanError` if no cut fits."""
    # no stage costs more than all layers and the two costliest transfers
    limit = float(
        (prefix.at_stop[:, -1] + 2 * np.max(prefix.at_stop - prefix.at_start, axis=1)).max()
    )
    reachable = reachable_boundaries(prefix, limit)
    if not reachable[-1][-1]:
        raise PlanError(
            f"no cut of {prefix.num_layers} layers into {prefix.num_stages} stages fits: "
            "give more memory or more stages, or recompute activations"
        )
    return prefix.bottleneck(_trace_back(prefix, limit, reachable))


def reachable_boundaries(prefix: PrefixCosts, bottleneck: float) -> list[Booleans]:
    """Return for 0, 1, 2 … stages where they can end if none costs more than the bottleneck."""
    ends = np.arange(prefix.num_layers + 1) == 0
    reachable = [ends]
    for stage in range(prefix.num_stages):
        starts = np.where(ends, prefix.at_start[stage], -np.inf)
        best = _largest_before(starts, stage, prefix.fitting_starts)
        ends = best >= prefix.at_stop[stage] - bottleneck
        reachable.append(ends)
        if not ends.any():
            break
    return reachable


def _largest_before(values: Floats, stage: int, fitting: FittingStarts | None) -> Floats:
    """Return for each position the largest of the values before it that fit."""
    if fitting is not None:
        return fitting.largest(values, stage)
    return np.concatenate(([-np.inf], np.maximum.accumulate(values)[:-1]))


def _even_boundaries(prefix: PrefixCosts, bottleneck: float) -> list[int]:
    """Return an even cut within a bottleneck; the most even one unless that takes too long."""
    limit = bottleneck * (1 + TIE)
    width = _max_layers(prefix, limit)
    if prefix.num_stages * prefix.num_layers * width <= MAX_STEPS:
        return _most_even(prefix, limit, width)
    return _trace_back(prefix, limit, reachable_boundaries(prefix, limit))


def _max_layers(prefix: PrefixCosts, limit: float) -> int:
    """Return the most layers that any stage can hold within the limit."""
    stops = np.arange(prefix.num_layers + 1)
    return max(
        int((stops - np.searchsorted(np.maximum.accumulate(starts), ends - limit)).max())
        for starts, ends in zip(prefix.at_start, prefix.at_stop, strict=True)
    )


def _most_even(prefix: PrefixCosts, limit: float, width: int) -> list[int]:
    """Return the cut with the smallest sum of squares; no stage has more than `width` layers."""
    squares = np.where(np.arange(prefix.num_layers + 1) == 0, 0.0, np.inf)
    starts = np.zeros(prefix.at_start.shape, dtype=np.int64)
    for stage in range(prefix.num_stages):
        later = prefix.num_stages - stage - 1
        stops = np.arange(stage + 1, prefix.num_layers - later + 1)
        tried = stops[:, None] + np.arange(-width, 0)
        costs = prefix.at_stop[stage, stops, None] - _before(prefix.at_start[stage], stops, width)
        sums = _before(squares, stops, width) + costs**2
        sums[costs > limit] = np.inf
        if prefix.first_fit is not None:
            sums[tried < prefix.first_fit[stage, stops, None]] = np.inf
        best = sums.argmin(axis=1)
        starts[stage, stops] = stops - width + best
        squares = np.full(prefix.num_layers + 1, np.inf)
        squares[stops] = sums[np.arange(len(stops)), best]
    assert squares[-1] < np.inf
    return _follow_back(starts)


def _before(values: Floats, stops: Integers, width: int) -> Floats:
    """Return a row for each stop with the `width` values before it, padded with infinity."""
    padded = np.concatenate((np.full(width, np.inf), values))
    return sliding_window_view(padded, width)[stops[0] : stops[-1] + 1]


def _follow_back(starts: Integers) -> list[int]:
    """Return the boundaries, given the best start of each stage for every stop."""
    boundaries = [starts.shape[1] - 1]
    for row in starts[::-1]:
        boundaries.append(int(row[boundaries[-1]]))
    return boundaries[::-1]


def _trace_back(prefix: PrefixCosts, limit: float, reachable: list[Booleans]) -> list[int]:
    """Return a cut within the limit, from the last stage to the first.

    Each stage is as close as possible to its even share of what is left.
    """
    boundaries = [prefix.num_layers]
    for stage in range(prefix.num_stages - 1, -1, -1):
        stop = boundaries[-1]
        costs = prefix.at_stop[stage, stop] - prefix.at_start[stage, :stop]
        possible = reachable[stage][:stop] & (costs <= limit * (1 + TIE))
        if prefix.first_fit is not None:
            possible[: prefix.first_fit[stage, stop]] = False
        assert possible.any()
        share = costs[0] / (stage + 1)
        boundaries.append(int(np.where(possible, np.abs(costs - share), np.inf).argmin()))
    return boundaries[::-1]
