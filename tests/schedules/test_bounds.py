"""The bounds never exceed the best of all orders, found by trying every one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.costs import Costs, Link
from stageline.schedules.action import Action, Kind
from stageline.schedules.build import build_schedule
from stageline.schedules.lower_bounds import lower_bounds
from stageline.schedules.placement import Placement, loop, wave
from stageline.schedules.schedule import Schedule
from stageline.schedules.search.problem import Candidate, SearchProblem
from stageline.schedules.search.search import search_schedule
from stageline.simulation.simulate import simulate


def all_orders(problem: SearchProblem, rank: int) -> Iterator[list[int]]:
    """Yield every order of a rank's tasks with ascending micro-batches that fits in memory."""
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


def best_of_all(problem: SearchProblem) -> tuple[float, float]:
    """Return the smallest makespan and the smallest longest span of all orders."""
    makespans, spans = [], []
    orders = [list(all_orders(problem, rank)) for rank in range(problem.num_ranks)]
    for lanes in product(*orders):
        candidate = Candidate.of(problem, list(lanes))
        if min(candidate.ends) >= 0:  # else it is a deadlock
            makespans.append(max(candidate.ends))
            spans.append(candidate.span)
    return min(makespans), min(spans)


def random_problem(placement: Placement, num_microbatches: int, seed: int) -> SearchProblem:
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
    return SearchProblem(placement, num_microbatches, costs, tuple(limits))


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
    _, best = best_of_all(SearchProblem(loop(2), 3, costs, limits))
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


SIZES = (0.1, 1 / 3, 1.0, 0.0)  # a tenth is no sum of powers of two: peaks and limits are rounded


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_no_order_beats_the_bounds_for_its_own_peaks(seed: int) -> None:
    """Draw any order that runs: chunks, unordered micro-batches, links, zeros, recomputation."""
    rng = random.Random(seed)
    placement = rng.choice([loop(2), loop(3), wave(2), loop(2, 2), wave(3), wave(2, 4), (0, 0, 1)])
    num_microbatches = rng.randint(1, 4)

    def numbers(*choices: float) -> list[float]:
        return [rng.choice(choices) for _ in placement]

    activation = numbers(*SIZES)
    costs = Costs(
        numbers(0.0, 1.0, 1.7),
        numbers(0.3, 1.0, 2.0),
        numbers(0.0, 0.7, 1.0),
        transfer=rng.choice((0.0, 0.4)),
        activation=activation,
        retained=[size * rng.choice((0.0, 0.5, 1.0)) for size in activation],
        recompute=rng.choice((0.0, 0.9)),
        message=rng.choice((0.0, 2.0)),
        links={(0, 1): Link(0.2, 10.0), (1, 0): Link(0.0, 5.0), (1, 2): Link(1.0, 3.0)},
    )
    timeline = simulate(random_schedule(placement, num_microbatches, rng), costs)
    bounds = lower_bounds(placement, num_microbatches, costs, timeline.peak_activations)
    assert bounds.makespan <= timeline.makespan * (1 + 1e-9)
    assert bounds.span <= max(timeline.rank_spans) * (1 + 1e-9)


def random_schedule(placement: Placement, num_microbatches: int, rng: random.Random) -> Schedule:
    """Draw actions one after another, in an order that respects their dependencies."""
    last = len(placement) - 1
    done: set[tuple[int, str, int]] = set()
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]

    def is_ready(stage: int, kind: str, microbatch: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage - 1, "F", microbatch) in done
        if kind == "I":
            before = (stage, "F", microbatch) if stage == last else (stage + 1, "I", microbatch)
            return before in done
        return (stage, "I", microbatch) in done

    waiting = [
        (s, kind, i) for s in range(last + 1) for kind in "FIW" for i in range(num_microbatches)
    ]
    while waiting:
        task = rng.choice([task for task in waiting if is_ready(*task)])
        waiting.remove(task)
        done.add(task)
        rows[placement[task[0]]].append(Action(task[0], Kind(task[1]), task[2]))
    return Schedule.of(rows, placement)


def test_peaks_that_are_rounded_do_not_raise_the_bound() -> None:
    """6 * 0.1 and the sum of six 0.1 differ in the last digit; no bound may depend on that."""
    costs = Costs(activation=0.1)
    timelines = [
        simulate(build_schedule(name, num_ranks=8, num_microbatches=6), costs)
        for name in ("zb_h2", "zb_2p")
    ]
    assert timelines[0].peak_activations == timelines[1].peak_activations
    best = min(timeline.makespan for timeline in timelines)
    assert all(timeline.lower_bound <= best for timeline in timelines)
