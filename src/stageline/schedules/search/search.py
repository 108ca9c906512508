"""Search for the best order of F, I and W: many ways to make one, then small moves on the best."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from math import inf
from typing import NamedTuple

from stageline.arguments import check_arguments, check_seconds, check_size, check_type, shown
from stageline.costs import Costs
from stageline.errors import CostsError, ScheduleError
from stageline.limits import MOST_STAGES, check_most, check_pipeline
from stageline.schedules.action import Kind
from stageline.schedules.bounds import Bounds
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.v_half import v_half
from stageline.schedules.families.v_min import v_min
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.families.zbv import zbv
from stageline.schedules.placement import Placement, loop, wave
from stageline.schedules.schedule import Schedule
from stageline.schedules.search.budget import Budget
from stageline.schedules.search.choosers import PREFERENCES, Policy, by_policy, follow
from stageline.schedules.search.improve import improve
from stageline.schedules.search.limits import activation_limits
from stageline.schedules.search.problem import Candidate, Lanes, Problem
from stageline.schedules.search.walk import Chooser, walk


def search_schedule(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | str | None = None,
    *,
    chunks_per_rank: int | None = None,
    placement: str = "straight",
    time_budget: float | None = None,
    seed: int = 0,
) -> Schedule:
    """The best order of F, I and W that can be found for these costs within a memory limit.

    Best is the shortest longest span: what counts when steps follow each other without a barrier.
    `memory_limit` is per rank: a number of micro-batches, or bytes as text ("22GiB", from which
    parameters and the like are taken off). `placement` is "straight" (one chunk a rank, or
    `chunks_per_rank` in a loop) or "v" (two, or another even number, in waves).

    The same call gives the same schedule, on any machine: the amount of work depends on sizes, or
    on `time_budget`, which is what so many seconds of one core of a small machine can do.

    >>> schedule = search_schedule(4, 8, Costs(weight_grad=0.5), memory_limit=8)
    >>> from stageline.simulation.simulate import simulate
    >>> timeline = simulate(schedule, Costs(weight_grad=0.5))
    >>> timeline.rank_spans[0], timeline.span_lower_bound
    (22.5, 22.5)
    """
    costs = Costs() if costs is None else costs
    check_type("costs", costs, Costs, "use sl.Costs(forward=…)", CostsError)
    check_size("num_ranks", num_ranks)
    check_size("num_microbatches", num_microbatches)
    if chunks_per_rank is not None:
        check_size("chunks_per_rank", chunks_per_rank)
    if time_budget is not None:
        check_seconds("time_budget", time_budget)
    check_arguments(search_schedule, locals())
    chunks = chunks_per_rank or (1 if placement == "straight" else 2)
    least = 2 * num_ranks if placement == "v" else 1  # shapes that it begins with are so long
    check_most("num_ranks", num_ranks, MOST_STAGES)
    check_pipeline(num_ranks * chunks, max(num_microbatches, least))
    where = _placement(placement, num_ranks, chunks_per_rank)
    costs.check_num_stages(len(where))
    limits = activation_limits(memory_limit, where, costs)
    problem = Problem(where, num_microbatches, costs, limits)
    with Budget.of(problem.num_tasks, time_budget) as budget:
        best = _search(problem, budget, random.Random(seed))
    return problem.schedule(best.lanes, "searched")


def _placement(placement: str, num_ranks: int, chunks_per_rank: int | None) -> Placement:
    if placement == "straight":
        return loop(num_ranks, chunks_per_rank or 1)
    if placement != "v":
        raise ScheduleError(
            f"placement is {shown(placement)}, but the search knows 'straight' and 'v'"
        )
    if chunks_per_rank is not None and chunks_per_rank % 2:
        raise ScheduleError(
            f"chunks_per_rank is {chunks_per_rank}, but a V has two, or two for each wave: "
            f"use {chunks_per_rank + 1}"
        )
    return wave(num_ranks, chunks_per_rank or 2)


class Way(NamedTuple):
    """A way to make an order: who picks F and I, how eager the first and last rank are for W."""

    choose: Chooser
    eagerness: tuple[float, float] = (0.5, 0.0)


PROFILES = tuple(product((0.5, 0.0, 0.2, 1.0), (0.0, 0.2, 0.5, 1.0)))
HOLDS = ((0.5, True), (0.25, True), (1.0, True), (0.25, False))  # and whether in fill only
NUM_REFINED = 3
NUM_ENOUGH = 8  # ways to try for a shorter makespan when the span is known to be the shortest
WALK_COST = 5  # a walk takes five times as long as timing the order that it leads to


def _search(problem: Problem, budget: Budget, rng: random.Random) -> Candidate:
    """Every way once, the best with every profile, small moves on those, then chance."""
    pool = [Candidate.of(problem, _one_at_a_time(problem))]

    def is_over() -> bool:
        return budget.is_spent or _best(pool).reaches(problem.bounds)

    def is_proven() -> bool:
        return _best(pool).reaches(Bounds(inf, problem.bounds.span))

    for number, way in enumerate(_first_ways(problem)):
        if is_over() or (number >= NUM_ENOUGH and is_proven()):
            break
        pool += _candidates(problem, way, budget)
    if is_proven():
        return _best(pool)
    leaders = sorted(pool, key=_score)[:NUM_REFINED]
    for leader, profile in product(leaders, PROFILES):
        if not is_over() and not is_proven():
            pool += _candidates(problem, Way(follow(problem, leader.lanes), profile), budget)
    leaders = sorted(pool, key=_score)[:NUM_REFINED]
    pool = [improve(problem, leader, budget.may_spend) for leader in leaders]
    while not is_over() and not is_proven():
        found = _candidates(problem, _random_way(problem, _best(pool), rng), budget)
        pool = [_best(pool)] + [improve(problem, one, budget.may_spend) for one in found]
    return _best(pool)


def _best(pool: list[Candidate]) -> Candidate:
    return min(pool, key=_score)


def _score(candidate: Candidate) -> tuple[float, float, float]:
    return candidate.score


def _candidates(problem: Problem, way: Way, budget: Budget) -> list[Candidate]:
    """The order that a way leads to, or none."""
    first, last = way.eagerness
    steps = max(1, problem.num_ranks - 1)
    eagerness = [first + (last - first) * rank / steps for rank in range(problem.num_ranks)]
    budget.may_spend(WALK_COST * problem.num_tasks)
    lanes = walk(problem, way.choose, eagerness)
    return [Candidate.of(problem, lanes)] if lanes else []


def _first_ways(problem: Problem) -> Iterator[Way]:
    for shape in _shapes(problem):
        yield Way(follow(problem, shape))
        yield Way(follow(problem, shape), (0.2, 0.0))
    for (hold, fill_only), prefer in product(HOLDS, PREFERENCES):
        if prefer == "turns" and problem.num_stages == problem.num_ranks:
            continue  # with one chunk there are no turns to take
        choose = by_policy(problem, Policy(prefer, hold, fill_only))
        yield Way(choose, (1.0, 1.0))
        yield Way(choose)


def _shapes(problem: Problem) -> Iterator[Lanes]:
    """Hand-made schedules on the same placement: their order of F and I is often the best."""
    shapes: dict[Placement, tuple[Callable[[int, int], Schedule], ...]] = {
        loop(problem.num_ranks): (zb_h2, zb_h1),
        loop(problem.num_ranks, 2): (interleaved_1f1b,),
        wave(problem.num_ranks): (zbv, v_half, v_min),
    }
    for family in shapes.get(problem.placement, ()):
        yield problem.lanes(family(problem.num_ranks, problem.num_microbatches))


def _one_at_a_time(problem: Problem) -> Lanes:
    """The order that always fits: each micro-batch up and down before the next."""
    lanes: Lanes = [[] for _ in problem.limits]
    row, home = problem.numbering.row, problem.placement
    for microbatch in range(problem.num_microbatches):
        for stage in range(problem.num_stages):
            lanes[home[stage]].append(row(Kind.F, stage) + microbatch)
        for stage in reversed(range(problem.num_stages)):
            lanes[home[stage]] += [row(kind, stage) + microbatch for kind in (Kind.I, Kind.W)]
    return lanes


def _random_way(problem: Problem, best: Candidate, rng: random.Random) -> Way:
    profile = (rng.random(), rng.random())
    if rng.random() < 0.5:
        return Way(follow(problem, best.lanes), profile)
    policy = Policy(rng.choice(PREFERENCES), rng.random(), rng.random() < 0.5)
    return Way(by_policy(problem, policy), profile)
