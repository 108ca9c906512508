"""Cut layers into stages of which each rank holds several: minimize the busiest rank's load.

    loop   0 1 2 0 1 2       wave   0 1 2 2 1 0       a rank's load is the sum of its stages' costs

If there are few cuts, all are tried, and with two stages per rank `two_stages_per_rank.py` finds
the best. Otherwise, or if the best does not fit in memory, a cut is improved step by step; a lower
bound says how far from the optimum it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from stageline.errors import PlanError
from stageline.planning.partition.one_stage_per_rank import (
    balance_of,
    best_boundaries,
    least_bottleneck,
)
from stageline.planning.partition.prefix_costs import PrefixCosts, prefix_costs
from stageline.planning.partition.two_stages_per_rank import best_two_stages_per_rank
from stageline.schedules.placement import Placement, loop, wave

LayerRun = tuple[int, int]  # the first layer of a stage, and the one after its last
RankFits = Callable[[tuple[LayerRun, ...], int], bool]  # the runs of a rank's stages in order, rank
FEW_CUTS = 20_000  # as many are all tried; a tenth of a second
MIN_GAIN = 1e-4  # relative; profiles are not more exact, and each step costs as much as a cut
MAX_CELLS = 1e8  # pairs of positions to look at for two stages per rank; about a second


@dataclass(frozen=True)
class SplitWithBound:
    """The layers of each stage, the load of the busiest rank, and a lower bound for any cut."""

    balance: tuple[int, ...]
    largest: float
    lower_bound: float

    @property
    def is_optimal(self) -> bool:
        """True if the cut is proven to be the best."""
        return self.largest <= self.lower_bound * (1 + 1e-9)


def split_into_chunks(
    costs: Sequence[float],
    placement: Placement,
    *,
    transfers: Sequence[float] | None = None,
    fits: RankFits | None = None,
    speeds: Sequence[float] | None = None,
) -> SplitWithBound:
    """Return the number of layers of each stage such that the busiest rank has the least load.

    `speeds` are those of the ranks. `fits(runs, rank)` says whether a rank has the memory for these
    runs of layers; part of what fits must also fit. The result is proven to be optimal if there are
    few cuts. Without memory limits, or if the optimum is within them, so it is with two stages per
    rank and up to some hundred layers. Compare `largest` and `lower_bound`.

    >>> split_into_chunks([4, 1, 1, 1, 1, 4], (0, 1, 1, 0))
    SplitWithBound(balance=(1, 1, 3, 1), largest=8.0, lower_bound=8.0)
    """
    num_ranks = max(placement, default=0) + 1
    by_rank = [1.0] * num_ranks if speeds is None else speeds
    if len(by_rank) != num_ranks:
        raise PlanError(
            f"speeds has {len(by_rank)} numbers, but the placement has {num_ranks} ranks: give one "
            "for each"
        )
    by_stage = [by_rank[rank] for rank in placement]
    prefix = prefix_costs(costs, len(placement), transfers=transfers, speeds=by_stage)
    problem = _Problem(prefix, placement, fits)
    if math.comb(prefix.num_layers - 1, prefix.num_stages - 1) <= FEW_CUTS:
        return problem.result(min(_all_cuts(prefix), key=problem.score))
    cheapest = sorted(transfers if transfers is not None else [0.0])[: prefix.num_stages - 1]
    bound = (sum(costs) + 2 * sum(cheapest) * min(by_rank)) / sum(by_rank)
    return _search(problem, max(bound, least_bottleneck(prefix)))


@dataclass(frozen=True, eq=False)
class _Problem:
    prefix: PrefixCosts
    placement: Placement
    fits: RankFits | None

    def loads(self, boundaries: Sequence[int]) -> list[float]:
        """Return the sum of the costs of each rank's stages."""
        loads = [0.0] * (max(self.placement) + 1)
        for rank, cost in zip(self.placement, self.prefix.stage_costs(boundaries), strict=True):
            loads[rank] += cost
        return loads

    def score(self, boundaries: Sequence[int]) -> tuple[int, float, float]:
        """Return what is minimized: misfits, then the largest load, then the sum of squares."""
        loads = self.loads(boundaries)
        return self.num_misfits(boundaries), max(loads), sum(load**2 for load in loads)

    def num_misfits(self, boundaries: Sequence[int]) -> int:
        """Return the number of ranks whose layers do not fit."""
        if self.fits is None:
            return 0
        return sum(not self.fits(runs, rank) for rank, runs in enumerate(self.runs(boundaries)))

    def runs(self, boundaries: Sequence[int]) -> list[tuple[LayerRun, ...]]:
        """Return the runs of layers of each rank."""
        pairs = list(zip(self.placement, pairwise(boundaries), strict=True))
        ranks = range(max(self.placement) + 1)
        return [tuple(run for holder, run in pairs if holder == rank) for rank in ranks]

    def result(self, boundaries: Sequence[int], lower_bound: float | None = None) -> SplitWithBound:
        """Return a cut as the result, or raise if it does not fit; optimal without a bound."""
        misfits, largest, _ = self.score(boundaries)
        if misfits:
            raise PlanError(
                f"no cut of {self.prefix.num_layers} layers into {self.prefix.num_stages} stages "
                f"on {max(self.placement) + 1} ranks was found that fits: give more memory or more "
                "ranks, or recompute activations"
            )
        return SplitWithBound(
            balance_of(boundaries), largest, largest if lower_bound is None else lower_bound
        )


def _all_cuts(prefix: PrefixCosts) -> Iterator[Sequence[int]]:
    for cuts in combinations(range(1, prefix.num_layers), prefix.num_stages - 1):
        yield (0, *cuts, prefix.num_layers)


def _search(problem: _Problem, bound: float) -> SplitWithBound:
    starts = [_as_if_one_stage_per_rank(problem)]
    exact = _best_without_limits(problem, starts[0], bound)
    if exact is not None:
        misfits, bound, _ = problem.score(exact)
        if not misfits:
            return problem.result(exact)
        starts.append(exact)
    improved = [_improve(problem, boundaries) for boundaries in starts]
    return problem.result(min(improved, key=problem.score), bound)


def _as_if_one_stage_per_rank(problem: _Problem) -> list[int]:
    """Return the best cut as if each stage had a rank of its own."""
    fits, placement = problem.fits, problem.placement
    if fits is None:
        return best_boundaries(problem.prefix)
    return best_boundaries(
        problem.prefix, lambda start, stop, stage: fits(((start, stop),), placement[stage])
    )


def _best_without_limits(
    problem: _Problem, boundaries: list[int], bound: float
) -> list[int] | None:
    """Return the best cut for two stages per rank, or None if ranks hold more or it takes long."""
    prefix, num_ranks = problem.prefix, max(problem.placement) + 1
    is_wave = problem.placement == wave(num_ranks)
    if not is_wave and problem.placement != loop(num_ranks, 2):
        return None
    cells = num_ranks * prefix.num_layers**2 * (25 if is_wave else prefix.num_layers / 6)
    if cells > MAX_CELLS:
        return None
    largest = max(problem.loads(boundaries))
    return best_two_stages_per_rank(prefix, boundaries, largest, is_wave=is_wave, low=bound)


def _improve(problem: _Problem, boundaries: list[int]) -> list[int]:
    """Cut stages of different ranks again, with the others fixed, until nothing changes."""
    improves = True
    while improves:
        improves = False
        for first, last in _windows(problem.placement):
            other = _cut_window(problem, boundaries, first, last)
            if other is not None and _is_better(problem.score(other), problem.score(boundaries)):
                boundaries, improves = other, True
    return boundaries


def _is_better(new: tuple[int, float, float], old: tuple[int, float, float]) -> bool:
    return new < (old[0], old[1] * (1 - MIN_GAIN), 0.0) or (
        new[0] == old[0] and new[1] <= old[1] and new[2] < old[2] * (1 - MIN_GAIN)
    )


def _windows(placement: Placement) -> Iterator[tuple[int, int]]:
    """Yield ranges of stages that are all on different ranks, as long as possible."""
    for first in range(0, len(placement), max(1, max(placement) // 4)):
        last = first
        while last < len(placement) and placement[last] not in placement[first:last]:
            last += 1
        if last - first > 1:
            yield first, last


def _cut_window(
    problem: _Problem, boundaries: list[int], first: int, last: int
) -> list[int] | None:
    """Return the best cut of the stages from `first` up to `last`, or None if none fits."""
    prefix, placement, fits = problem.prefix, problem.placement, problem.fits
    own, loads = prefix.stage_costs(boundaries), problem.loads(boundaries)
    fixed = np.array([loads[placement[stage]] - own[stage] for stage in range(first, last)])
    low, high = boundaries[first], boundaries[last]
    part = (slice(first, last), slice(low, high + 1))
    window = PrefixCosts(prefix.at_start[part], prefix.at_stop[part] + fixed[:, None])

    def fits_with_others(start: int, stop: int, stage: int) -> bool:
        assert fits is not None
        rank, stage = placement[first + stage], first + stage
        runs = [
            (low + start, low + stop) if s == stage else (boundaries[s], boundaries[s + 1])
            for s, holder in enumerate(placement)
            if holder == rank
        ]
        return fits(tuple(runs), rank)

    try:
        inner = best_boundaries(window, fits_with_others if fits is not None else None)
    except PlanError:
        return None
    return [*boundaries[:first], *(low + position for position in inner), *boundaries[last + 1 :]]
