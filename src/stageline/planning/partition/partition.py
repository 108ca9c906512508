"""Cut layers into stages: the costliest stage as cheap as can be, then all as even as can be.

    costs      4  1  1  1  4
    3 stages   4 │ 1  1  1 │ 4        balance (1, 3, 1), bottleneck 4

A bottleneck is possible or not: which positions can s stages end at, if none may cost more? That is
one running maximum a stage, and bisection over the bottleneck does the rest. Furthest-first packing
would be wrong here: a longer stage may be cheaper, where the cut behind it carries less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stageline.errors import PlanError
from stageline.planning.partition.chain import (
    Chain,
    Fits,
    Flags,
    Floats,
    Whole,
    Windows,
    chain_of,
    first_fits,
)
from stageline.planning.profiling.profile import LayerCost, Measurement

TIE = 1e-12  # relative; costs that differ by less are the same: rounding is about 1e-13 of a stage
NEAR = 1e-6  # relative; so near to the end few other costs are left in between
CHEAP = 5e7  # stages × layers × starts that are tried to make stages even; about half a second
STATE_COPIES = 4  # of each parameter: itself, its gradient and Adam's two moments


def split(
    costs: Sequence[float],
    num_stages: int,
    *,
    transfers: Sequence[float] | None = None,
    fits: Fits | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """How many layers each stage takes so that the costliest stage costs the least.

    A stage costs the sum of its layers, divided by the speed of its device, and the transfers at
    both its ends; `transfers[i]` is between layers i and i + 1. `fits(start, stop, stage)` says
    whether a run may be that stage; what fits, fits in parts too. Of all such splits it is the one
    with the smallest sum of squares, unless there are too many to look at.

    >>> split([4, 1, 1, 1, 4], 3)
    (1, 3, 1)
    >>> split([4, 1, 1, 1, 4], 2, transfers=[0, 9, 9, 0])
    (1, 4)
    """
    chain = chain_of(costs, num_stages, transfers=transfers, speeds=speeds)
    return balance_of(best_ends(chain, fits))


def balance_by(rule: str, measurement: Measurement, num_stages: int) -> tuple[int, ...]:
    """By a rule of thumb that looks at one number a layer, and at no transfers or memory limits.

    "time": the slowest stage is as fast as can be. "size": the largest stage is as small as can be,
    activations and parameters with their gradients and Adam's state. "variance": the stages' times
    vary as little as can be, which is what GPipe's own partitioner aims at.
    """
    if rule not in RULES:
        raise PlanError(f"the rule is {rule!r}, but has to be one of {', '.join(RULES)}")
    chain = chain_of([RULES[rule](layer) for layer in measurement.layers], num_stages)
    ends = best_ends(chain)
    return balance_of(_least_variance(chain, ends) if rule == "variance" else ends)


def balance_of(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(ends))


def best_ends(chain: Chain, fits: Fits | None = None) -> list[int]:
    """The positions between the stages, 0 and the last included."""
    unlimited = least_bottleneck(chain)
    ends = _within(chain, unlimited)
    if fits is None or all(fits(*run, stage) for stage, run in enumerate(pairwise(ends))):
        return ends  # what is best without limits, and keeps to them, is best with them
    chain = replace(chain, first_fit=first_fits(fits, chain.num_layers, chain.num_stages))
    return _within(chain, least_bottleneck(chain, low=unlimited * (1 - TIE)))


def least_bottleneck(chain: Chain, low: float = 0.0) -> float:
    def attempt(bottleneck: float) -> float | None:
        found = reached(chain, bottleneck)
        is_possible = bool(found[-1][-1])
        return chain.largest(_evenly_back(chain, bottleneck, found)) if is_possible else None

    return least(low, _possible_bottleneck(chain), attempt)


def least(low: float, high: float, attempt: Callable[[float], float | None]) -> float:
    """Bisection between a bound and what is possible; a tie less than the result is not possible.

    An attempt to stay within a number gives what it came to, or None. Near the end every other one
    asks whether the best so far is the least already, which halves their number.
    """
    asked = False
    while high - low > TIE * high:
        asked = high - low < NEAR * high and not asked
        middle = high * (1 - TIE) if asked else (low + high) / 2
        if not low < middle < high:  # the smallest of floats have none in between
            break
        came_to = attempt(middle)
        if came_to is None:
            low = middle
        else:
            high = min(middle, came_to)
    return high


def _possible_bottleneck(chain: Chain) -> float:
    """Of some cut: no stage costs more than all layers and the two dearest cuts."""
    most = float((chain.tail[:, -1] + 2 * np.max(chain.tail - chain.head, axis=1)).max())
    found = reached(chain, most)
    if not found[-1][-1]:
        raise PlanError(
            f"no cut of {chain.num_layers} layers into {chain.num_stages} stages fits: "
            "give more memory or more stages, or recompute activations"
        )
    return chain.largest(_evenly_back(chain, most, found))


def reached(chain: Chain, bottleneck: float) -> list[Flags]:
    """For 0, 1, 2 … stages, the positions where they can end if none costs more than that."""
    ends = np.arange(chain.num_layers + 1) == 0
    found = [ends]
    for stage in range(chain.num_stages):
        heads = np.where(ends, chain.head[stage], -np.inf)
        best = _largest_before(heads, stage, chain.windows)
        ends = best >= chain.tail[stage] - bottleneck
        found.append(ends)
        if not ends.any():
            break
    return found


def _largest_before(values: Floats, stage: int, windows: Windows | None) -> Floats:
    """For each position, the largest of the values that stand before it and fit."""
    if windows is not None:
        return windows.largest(values, stage)
    return np.concatenate(([-np.inf], np.maximum.accumulate(values)[:-1]))


def _within(chain: Chain, bottleneck: float) -> list[int]:
    limit = bottleneck * (1 + TIE)
    width = _widest(chain, limit)
    if chain.num_stages * chain.num_layers * width <= CHEAP:
        return _evenest(chain, limit, width)
    return _evenly_back(chain, limit, reached(chain, limit))


def _widest(chain: Chain, limit: float) -> int:
    """The most layers that any stage can hold within the limit."""
    stops = np.arange(chain.num_layers + 1)
    return max(
        int((stops - np.searchsorted(np.maximum.accumulate(head), tail - limit)).max())
        for head, tail in zip(chain.head, chain.tail, strict=True)
    )


def _evenest(chain: Chain, limit: float, width: int) -> list[int]:
    """The smallest sum of squares, no stage above the limit nor of more layers than `width`."""
    squares = np.where(np.arange(chain.num_layers + 1) == 0, 0.0, np.inf)
    starts = np.zeros(chain.head.shape, dtype=np.int64)
    for stage in range(chain.num_stages):
        later = chain.num_stages - stage - 1
        stops = np.arange(stage + 1, chain.num_layers - later + 1)
        tried = stops[:, None] + np.arange(-width, 0)
        costs = chain.tail[stage, stops, None] - _before(chain.head[stage], stops, width)
        sums = _before(squares, stops, width) + costs**2
        sums[costs > limit] = np.inf
        if chain.first_fit is not None:
            sums[tried < chain.first_fit[stage, stops, None]] = np.inf
        best = sums.argmin(axis=1)
        starts[stage, stops] = stops - width + best
        squares = np.full(chain.num_layers + 1, np.inf)
        squares[stops] = sums[np.arange(len(stops)), best]
    assert squares[-1] < np.inf
    return _followed_back(starts)


def _before(values: Floats, stops: Whole, width: int) -> Floats:
    """Row by row, the `width` values in front of each stop; infinite where there are none."""
    padded = np.concatenate((np.full(width, np.inf), values))
    return sliding_window_view(padded, width)[stops[0] : stops[-1] + 1]


def _followed_back(starts: Whole) -> list[int]:
    ends = [starts.shape[1] - 1]
    for row in starts[::-1]:
        ends.append(int(row[ends[-1]]))
    return ends[::-1]


def _evenly_back(chain: Chain, limit: float, found: list[Flags]) -> list[int]:
    """From the last stage to the first, each as near as can be to its share of what is left."""
    ends = [chain.num_layers]
    for stage in range(chain.num_stages - 1, -1, -1):
        costs = chain.tail[stage, ends[-1]] - chain.head[stage, : ends[-1]]
        possible = found[stage][: ends[-1]] & (costs <= limit * (1 + TIE))
        if chain.first_fit is not None:
            possible[: chain.first_fit[stage, ends[-1]]] = False
        assert possible.any()
        share = costs[0] / (stage + 1)
        ends.append(int(np.where(possible, np.abs(costs - share), np.inf).argmin()))
    return ends[::-1]


def _least_variance(chain: Chain, ends: list[int]) -> list[int]:
    """The sum is the same for all cuts, so the least sum of squares has the least variance.

    A stage further from the mean than all stages of the given cut together cannot be in a better
    one: that bounds the stages to try.
    """
    costs = np.array(chain.costs(ends))
    limit = (costs.mean() + np.sqrt(((costs - costs.mean()) ** 2).sum())) * (1 + TIE)
    return _evenest(chain, limit, _widest(chain, limit))


def _time(layer: LayerCost) -> float:
    return layer.time


def _size(layer: LayerCost) -> float:
    return layer.activation + STATE_COPIES * layer.parameters


RULES = {"time": _time, "size": _size, "variance": _time}
