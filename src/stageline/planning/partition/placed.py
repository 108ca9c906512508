"""Cut layers into stages of which each rank holds several: the busiest rank as idle as can be.

    loop   0 1 2 0 1 2       wave   0 1 2 2 1 0       a rank's load is the sum of its stages' costs

Few cuts are tried one by one, and with two stages a rank `two_stages.py` finds the best. What is
left, and what does not fit then, is improved step by step, with a bound below which no cut is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from stageline.errors import PlanError
from stageline.planning.partition.chain import Chain, chain_of
from stageline.planning.partition.partition import balance_of, best_ends, least_bottleneck, split
from stageline.planning.partition.two_stages import improved_on_two_stages
from stageline.schedules.placement import Placement, loop, wave

Run = tuple[int, int]
RankFits = Callable[[tuple[Run, ...], int], bool]  # the runs of a rank, in order of its stages
FEW = 20_000  # cuts that are tried one by one; a tenth of a second
WORTHWHILE = 1e-4  # relative; a profile is not more exact, and each step costs like a split
MANY = 1e8  # pairs of positions that are looked at for two stages a rank; about a second


@dataclass(frozen=True)
class PlacedSplit:
    """Layers of each stage, the load of the busiest rank, and the least that any cut can have."""

    balance: tuple[int, ...]
    largest: float
    lower_bound: float

    @property
    def is_optimal(self) -> bool:
        return self.largest <= self.lower_bound * (1 + 1e-9)


def split_placed(
    costs: Sequence[float],
    placement: Placement,
    *,
    transfers: Sequence[float] | None = None,
    fits: RankFits | None = None,
    speeds: Sequence[float] | None = None,
) -> PlacedSplit:
    """Like `split`, for the stages of a placement; `speeds` are those of the ranks.

    `fits(runs, rank)` says whether a rank may hold these runs of layers; part of what fits, fits.
    Proven best if there are few cuts; without limits, or if the best keeps to them, also with two
    stages a rank on up to some hundred layers. Compare `largest` and `lower_bound`.

    >>> split_placed([4, 1, 1, 1, 1, 4], (0, 1, 1, 0))
    PlacedSplit(balance=(1, 1, 3, 1), largest=8.0, lower_bound=8.0)
    """
    ranks = [1.0] * (max(placement, default=0) + 1) if speeds is None else speeds
    if len(ranks) != max(placement, default=0) + 1:
        raise PlanError(
            f"speeds has {len(ranks)} numbers, but the placement has "
            f"{max(placement, default=0) + 1} ranks: give one each"
        )
    by_stage = [ranks[rank] for rank in placement]
    chain = chain_of(costs, len(placement), transfers=transfers, speeds=by_stage)
    problem = _Problem(chain, placement, fits)
    if math.comb(chain.num_layers - 1, chain.num_stages - 1) <= FEW:
        return problem.proven(min(_all_cuts(chain), key=problem.worth))
    sent = sorted(transfers if transfers is not None else [0.0])[: chain.num_stages - 1]
    bound = (sum(costs) + 2 * sum(sent) * min(ranks)) / sum(ranks)
    return _searched(problem, max(bound, least_bottleneck(chain)))


def balance_for(
    costs: Sequence[float],
    placement: Placement,
    speeds: Sequence[float],
    fits: RankFits | None = None,
) -> tuple[int, ...]:
    """By `split` if each rank holds one stage, by `split_placed` if it holds several.

    >>> balance_for([1, 1, 1, 1], (0, 1), [3, 1]), balance_for([1, 1, 1, 1], (0, 1, 1, 0), [1, 1])
    ((3, 1), (1, 1, 1, 1))
    """
    if len(placement) > len(speeds):
        return split_placed(costs, placement, speeds=speeds, fits=fits).balance

    def stage_fits(start: int, stop: int, stage: int) -> bool:
        return fits is None or fits(((start, stop),), placement[stage])

    by_stage = [speeds[rank] for rank in placement]
    return split(costs, len(placement), speeds=by_stage, fits=stage_fits if fits else None)


@dataclass(frozen=True, eq=False)
class _Problem:
    chain: Chain
    placement: Placement
    fits: RankFits | None

    def loads(self, ends: Sequence[int]) -> list[float]:
        loads = [0.0] * (max(self.placement) + 1)
        for rank, cost in zip(self.placement, self.chain.costs(ends), strict=True):
            loads[rank] += cost
        return loads

    def worth(self, ends: Sequence[int]) -> tuple[int, float, float]:
        """Less is better: ranks that do not fit, the largest load, and how uneven they are."""
        loads = self.loads(ends)
        return self.misfits(ends), max(loads), sum(load**2 for load in loads)

    def misfits(self, ends: Sequence[int]) -> int:
        if self.fits is None:
            return 0
        return sum(not self.fits(runs, rank) for rank, runs in enumerate(self.runs(ends)))

    def runs(self, ends: Sequence[int]) -> list[tuple[Run, ...]]:
        pairs = list(zip(self.placement, pairwise(ends), strict=True))
        ranks = range(max(self.placement) + 1)
        return [tuple(run for home, run in pairs if home == rank) for rank in ranks]

    def proven(self, ends: Sequence[int], lower_bound: float | None = None) -> PlacedSplit:
        misfits, largest, _ = self.worth(ends)
        if misfits:
            raise PlanError(
                f"no cut of {self.chain.num_layers} layers was found that fits on "
                f"{max(self.placement) + 1} ranks of {self.chain.num_stages} stages: "
                "give more memory or more ranks, or recompute activations"
            )
        return PlacedSplit(
            balance_of(ends), largest, largest if lower_bound is None else lower_bound
        )


def _all_cuts(chain: Chain) -> Iterator[Sequence[int]]:
    for cuts in combinations(range(1, chain.num_layers), chain.num_stages - 1):
        yield (0, *cuts, chain.num_layers)


def _searched(problem: _Problem, bound: float) -> PlacedSplit:
    starts = [_equal_stages(problem)]
    exact = _two_stages_a_rank(problem, starts[0], bound)
    if exact is not None:
        misfits, bound, _ = problem.worth(exact)
        if not misfits:
            return problem.proven(exact)
        starts.append(exact)
    return problem.proven(
        min((_improved(problem, ends) for ends in starts), key=problem.worth), bound
    )


def _equal_stages(problem: _Problem) -> list[int]:
    """The best as if each stage had a rank of its own."""
    fits, placement = problem.fits, problem.placement
    if fits is None:
        return best_ends(problem.chain)
    return best_ends(
        problem.chain, lambda start, stop, stage: fits(((start, stop),), placement[stage])
    )


def _two_stages_a_rank(problem: _Problem, ends: list[int], bound: float) -> list[int] | None:
    """The best without limits, or None where ranks hold more than two, or there are too many."""
    chain, num_ranks = problem.chain, max(problem.placement) + 1
    is_wave = problem.placement == wave(num_ranks)
    if not is_wave and problem.placement != loop(num_ranks, 2):
        return None
    cells = num_ranks * chain.num_layers**2 * (25 if is_wave else chain.num_layers / 6)
    if cells > MANY:
        return None
    largest = max(problem.loads(ends))
    return improved_on_two_stages(chain, ends, largest, is_wave=is_wave, low=bound)


def _improved(problem: _Problem, ends: list[int]) -> list[int]:
    """Cut stages of different ranks anew, the others as they are, until that changes nothing."""
    improves = True
    while improves:
        improves = False
        for first, last in _windows(problem.placement):
            other = _cut_anew(problem, ends, first, last)
            if other is not None and _is_better(problem.worth(other), problem.worth(ends)):
                ends, improves = other, True
    return ends


def _is_better(new: tuple[int, float, float], old: tuple[int, float, float]) -> bool:
    return new < (old[0], old[1] * (1 - WORTHWHILE), 0.0) or (
        new[0] == old[0] and new[1] <= old[1] and new[2] < old[2] * (1 - WORTHWHILE)
    )


def _windows(placement: Placement) -> Iterator[Run]:
    """From every so many stages on, as many as are on different ranks."""
    for first in range(0, len(placement), max(1, max(placement) // 4)):
        last = first
        while last < len(placement) and placement[last] not in placement[first:last]:
            last += 1
        if last - first > 1:
            yield first, last


def _cut_anew(problem: _Problem, ends: list[int], first: int, last: int) -> list[int] | None:
    chain, placement, fits = problem.chain, problem.placement, problem.fits
    own, loads = chain.costs(ends), problem.loads(ends)
    beside = np.array([loads[placement[stage]] - own[stage] for stage in range(first, last)])
    low, high = ends[first], ends[last]
    part = (slice(first, last), slice(low, high + 1))
    window = Chain(chain.head[part], chain.tail[part] + beside[:, None])

    def fits_beside(start: int, stop: int, stage: int) -> bool:
        assert fits is not None
        rank, stage = placement[first + stage], first + stage
        held = [
            (low + start, low + stop) if s == stage else (ends[s], ends[s + 1])
            for s, home in enumerate(placement)
            if home == rank
        ]
        return fits(tuple(held), rank)

    try:
        inner = best_ends(window, fits_beside if fits is not None else None)
    except PlanError:
        return None
    return [*ends[:first], *(low + end for end in inner), *ends[last + 1 :]]
