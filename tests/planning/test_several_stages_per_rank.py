"""Cuts for several stages per rank: optimal, or within their bound."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import PlanError
from stageline.planning.partition import several_stages_per_rank
from stageline.planning.partition.several_stages_per_rank import (
    LayerRun,
    SplitWithBound,
    split_into_chunks,
)
from stageline.schedules.placement import Placement, loop, wave

many = settings(max_examples=150, deadline=None)
numbers = st.integers(0, 12)
PLACEMENTS = [loop(2, 2), wave(2), loop(3, 2), wave(3), loop(2, 3), wave(2, 3), loop(3), loop(1, 3)]


def runs_of(balance: Sequence[int]) -> list[LayerRun]:
    ends = [sum(balance[:stage]) for stage in range(len(balance) + 1)]
    return list(pairwise(ends))


def all_cuts(num_layers: int, num_stages: int) -> Iterator[list[LayerRun]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield list(pairwise((0, *cuts, num_layers)))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    placement = draw(st.sampled_from(PLACEMENTS))
    num_layers = draw(st.integers(len(placement), 9))
    num_ranks = max(placement) + 1
    return {
        "costs": draw(st.lists(numbers, min_size=num_layers, max_size=num_layers)),
        "placement": placement,
        "transfers": draw(
            st.none() | st.lists(numbers, min_size=num_layers - 1, max_size=num_layers - 1)
        ),
        "speeds": draw(
            st.none()
            | st.lists(st.sampled_from([0.5, 1, 2, 4]), min_size=num_ranks, max_size=num_ranks)
        ),
    }


def largest_load(runs: Sequence[LayerRun], problem: dict[str, Any]) -> float:
    num_ranks = max(problem["placement"]) + 1
    speeds = problem["speeds"] or [1] * num_ranks
    cuts = [0, *(problem["transfers"] or [0] * (len(problem["costs"]) - 1)), 0]
    loads = [0.0] * num_ranks
    for (start, stop), rank in zip(runs, problem["placement"], strict=True):
        loads[rank] += sum(problem["costs"][start:stop]) / speeds[rank] + cuts[start] + cuts[stop]
    return max(loads)


class Memory:
    """The sizes of layers and the memory of each rank."""

    def __init__(self, sizes: Sequence[int], limits: Sequence[int]) -> None:
        self.sizes, self.limits = sizes, limits

    def fits(self, runs: tuple[LayerRun, ...], rank: int) -> bool:
        return sum(sum(self.sizes[start:stop]) for start, stop in runs) <= self.limits[rank]

    def fits_all(self, runs: Sequence[LayerRun], placement: Placement) -> bool:
        ranks = range(max(placement) + 1)
        pairs = list(zip(runs, placement, strict=True))
        return all(self.fits(tuple(run for run, r in pairs if r == rank), rank) for rank in ranks)


memories = st.builds(
    Memory,
    st.lists(numbers, min_size=9, max_size=9),
    st.lists(st.integers(15, 60), min_size=3, max_size=3),
)


def without_trying_all(problem: dict[str, Any], **more: Any) -> SplitWithBound:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several_stages_per_rank, "FEW_CUTS", 0)
        return split_into_chunks(**problem, **more)


@many
@given(problems(), memories)
def test_if_there_are_few_cuts_the_best_that_fits_is_found(
    problem: dict[str, Any], memory: Memory
) -> None:
    placement = problem["placement"]
    fitting = [
        runs
        for runs in all_cuts(len(problem["costs"]), len(placement))
        if memory.fits_all(runs, placement)
    ]
    if not fitting:
        with pytest.raises(PlanError, match="give more memory or more ranks"):
            split_into_chunks(**problem, fits=memory.fits)
        return
    found = split_into_chunks(**problem, fits=memory.fits)
    assert runs_of(found.balance) in fitting
    best = min(largest_load(runs, problem) for runs in fitting)
    assert found.largest == found.lower_bound == best
    assert largest_load(runs_of(found.balance), problem) == best


@many
@given(problems())
def test_with_two_stages_per_rank_the_best_is_found(problem: dict[str, Any]) -> None:
    found = without_trying_all(problem)
    cuts = all_cuts(len(problem["costs"]), len(problem["placement"]))
    best = min(largest_load(runs, problem) for runs in cuts)
    assert largest_load(runs_of(found.balance), problem) == pytest.approx(found.largest)
    assert found.lower_bound <= best * (1 + 1e-9)
    if len(problem["placement"]) == 2 * (max(problem["placement"]) + 1):
        assert found.is_optimal
        assert found.largest == pytest.approx(best)


@many
@given(problems(), memories)
def test_an_improved_cut_fits_and_respects_its_lower_bound(
    problem: dict[str, Any], memory: Memory
) -> None:
    placement = problem["placement"]
    try:
        found = without_trying_all(problem, fits=memory.fits)
    except PlanError:
        return  # it may not find one that fits
    fitting = [
        runs
        for runs in all_cuts(len(problem["costs"]), len(placement))
        if memory.fits_all(runs, placement)
    ]
    assert runs_of(found.balance) in fitting
    best = min(largest_load(runs, problem) for runs in fitting)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.largest >= best * (1 - 1e-9)


@pytest.mark.parametrize("placement", [loop(8, 2), wave(8), loop(8, 4), wave(4, 4)])
def test_a_transformer_is_cut_within_a_tenth_of_the_bound(placement: Placement) -> None:
    """96 blocks between an embedding and a head, none of them quite like the other."""
    rng = random.Random(0)
    costs = [0.3, *(rng.uniform(0.98, 1.02) for _ in range(96)), 2.5]
    found = split_into_chunks(costs, placement)
    assert sum(found.balance) == 98
    assert min(found.balance) >= 1
    assert found.largest <= 1.1 * found.lower_bound


def test_in_a_wave_the_rank_of_the_head_gets_fewer_first_layers() -> None:
    found = split_into_chunks([1, 1, 1, 1, 1, 1, 1, 1, 3], wave(2))
    assert found.largest == 6
    assert found.is_optimal


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="there are 3 layers, but 4 stages need at least one each"):
        split_into_chunks([1, 1, 1], wave(2))


def test_speeds_are_those_of_the_ranks() -> None:
    assert split_into_chunks([1] * 12, wave(2), speeds=[2, 1]).largest == 4  # 8 layers and 4
    message = "speeds has 4 numbers, but the placement has 2 ranks: give one for each"
    with pytest.raises(PlanError, match=f"^{message}$"):
        split_into_chunks([1] * 12, wave(2), speeds=[2, 1, 1, 2])


def test_a_placement_without_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="num_stages is 0, but has to be at least 1"):
        split_into_chunks([1], ())
