"""The bounds are below the best of all orders, found by trying every one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from stageline.costs import Costs
from stageline.schedules.bounds import lower_bounds
from stageline.schedules.placement import Placement, loop, wave
from stageline.schedules.search.problem import Candidate, Problem
from stageline.schedules.search.search import search_schedule
from stageline.simulation.simulate import simulate


def all_orders(problem: Problem, rank: int) -> Iterator[list[int]]:
    """Every order of a rank's tasks that keeps micro-batches ascending and fits in its memory."""
    size, num_forwards = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    rows = [
        phase * num_forwards + stage * size for stage in problem.stages[rank] for phase in range(3)
    ]

    def grow(lane: list[int], done: dict[int, int]) -> Iterator[list[int]]:
        if len(lane) == len(rows) * size:
            yield lane
            return
        for row in rows:
            is_first = row < num_forwards
            if done[row] < size and (is_first or done[row] < done[row - num_forwards]):
                longer = [*lane, row + done[row]]
                if problem.fits(longer, rank):
                    yield from grow(longer, done | {row: done[row] + 1})

    return grow([], dict.fromkeys(rows, 0))


def best_of_all(problem: Problem) -> tuple[float, float]:
    """The smallest makespan and the smallest longest span of all orders."""
    makespans, spans = [], []
    orders = [list(all_orders(problem, rank)) for rank in range(problem.num_ranks)]
    for lanes in product(*orders):
        candidate = Candidate.of(problem, list(lanes))
        if min(candidate.ends) >= 0:  # else it is a deadlock
            makespans.append(max(candidate.ends))
            spans.append(candidate.span)
    return min(makespans), min(spans)


def random_problem(placement: Placement, num_microbatches: int, seed: int) -> Problem:
    rng = random.Random(seed)
    num_stages, num_ranks = len(placement), max(placement) + 1

    def numbers(low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(num_stages)]

    activation = numbers(0.5, 1.5)
    retained = [size * rng.choice((0.0, 0.4, 1.0)) for size in activation]
    times = (numbers(0.5, 1.5), numbers(0.5, 1.5), numbers(0.1, 1.0))
    costs = Costs(*times, transfer=rng.choice((0.0, 0.3)), activation=activation, retained=retained)
    limits = []
    for rank in range(num_ranks):
        needed = sum(a for a, home in zip(activation, placement, strict=True) if home == rank)
        limits.append(needed * rng.choice((1.0, 1.5, 2.0, 10.0)))
    return Problem(placement, num_microbatches, costs, tuple(limits))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("placement", "num_microbatches"), [(loop(2), 2), (loop(2), 3), (loop(3), 2), (wave(2), 1)]
)
def test_no_order_beats_the_bounds(placement: Placement, num_microbatches: int, seed: int) -> None:
    problem = random_problem(placement, num_microbatches, seed)
    makespan, span = best_of_all(problem)
    bounds = lower_bounds(placement, num_microbatches, problem.costs, problem.limits)
    assert bounds.makespan <= makespan * (1 + 1e-9)
    assert bounds.span <= span * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_best_of_all_orders(seed: int) -> None:
    problem = random_problem(loop(2), 3, seed)
    costs = problem.costs
    limit = 1 + seed % 3
    limits = tuple(limit * size for size in problem.activation)
    _, best = best_of_all(Problem(loop(2), 3, costs, limits))
    timeline = simulate(search_schedule(2, 3, costs, memory_limit=limit), costs)
    assert max(timeline.rank_spans) == pytest.approx(best, rel=1e-9)


def test_with_memory_for_all_equal_stages_are_bound_by_work_alone() -> None:
    bounds = lower_bounds(loop(4), 8, Costs(), [8.0] * 4)
    assert bounds.span == pytest.approx(3 * 8)
    assert bounds.makespan == pytest.approx(3 + 3 * 8)  # the last rank starts three forwards late


def test_with_little_memory_activations_that_live_long_are_the_bound() -> None:
    """On rank 0 each of 8 activations lives for 4 F and 4 I, and only one fits."""
    bounds = lower_bounds(loop(4), 8, Costs(), [1.0] * 4)
    assert bounds.span == pytest.approx(8 * 8 + 1)
