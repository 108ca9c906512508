"""Search for the best order of F, I and W: build many, then improve the best by local search."""

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
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.v_half import v_half
from stageline.schedules.families.v_min import v_min
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.families.zbv import zbv
from stageline.schedules.lower_bounds import Bounds
from stageline.schedules.placement import Placement, loop, wave
from stageline.schedules.schedule import Schedule
from stageline.schedules.search.budget import SearchBudget
from stageline.schedules.search.list_scheduling import PriorityRule, list_schedule
from stageline.schedules.search.local_search import improve
from stageline.schedules.search.memory_limits import activation_limits
from stageline.schedules.search.priority_rules import (
    PREFERENCES,
    PriorityPolicy,
    by_policy,
    follow_order,
)
from stageline.schedules.search.problem import Candidate, Lanes, SearchProblem


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
    """Return the best order of F, I and W found for these costs within a memory limit.

    The best order has the shortest longest rank span, which sets the throughput when steps follow
    each other without a barrier. `memory_limit` is per rank: a number of micro-batches, or bytes
    as text, such as "22GiB", which include parameters, gradients and optimizer state. `placement`
    is "straight" (one chunk per rank, or `chunks_per_rank` in a loop) or "v" (two, or another even
    number, in waves).

    The same call returns the same schedule on any machine: `time_budget` is not measured, but
    converted to the work that one core of a small machine does in that many seconds.

    >>> schedule = search_schedule(4, 8, Costs(weight_grad=0.5), memory_limit=8)
    >>> from stageline.simulation.simulate import simulate
    >>> timeline = simulate(schedule, Costs(weight_grad=0.5))
    >>> timeline.rank_spans[0], timeline.span_lower_bound
    (22.5, 22.5)
    """
    return watched_search(None, **locals())


def watched_search(
    watch: Callable[[float], None] | None,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory_limit: float | str | None,
    chunks_per_rank: int | None,
    placement: str,
    time_budget: float | None,
    seed: int,
) -> Schedule:
    """Search as `search_schedule` does, and call `watch` with the share of the work done so far."""
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
    least = 2 * num_ranks if placement == "v" else 1  # the length of the initial schedules
    check_most("num_ranks", num_ranks, MOST_STAGES)
    check_pipeline(num_ranks * chunks, max(num_microbatches, least))
    stage_ranks = _placement(placement, num_ranks, chunks_per_rank)
    costs.check_num_stages(len(stage_ranks))
    limits = activation_limits(memory_limit, stage_ranks, costs)
    problem = SearchProblem(stage_ranks, num_microbatches, costs, limits)
    with SearchBudget.of(problem.num_tasks, time_budget, watch) as budget:
        best = _search(problem, budget, random.Random(seed))
    return problem.schedule(best.lanes, "searched")


def _placement(placement: str, num_ranks: int, chunks_per_rank: int | None) -> Placement:
    if placement == "straight":
        return loop(num_ranks, chunks_per_rank or 1)
    if placement != "v":
        raise ScheduleError(f"placement is {shown(placement)}, but must be 'straight' or 'v'")
    if chunks_per_rank is not None and chunks_per_rank % 2:
        raise ScheduleError(
            f"chunks_per_rank is {chunks_per_rank}, but a V has two, or two for each wave: "
            f"use {chunks_per_rank + 1}"
        )
    return wave(num_ranks, chunks_per_rank or 2)


class OrderRecipe(NamedTuple):
    """A rule for F and I, and the eagerness for W of the first and the last rank."""

    rule: PriorityRule
    eagerness: tuple[float, float] = (0.5, 0.0)


PROFILES = tuple(product((0.5, 0.0, 0.2, 1.0), (0.0, 0.2, 0.5, 1.0)))
HOLDS = ((0.5, True), (0.25, True), (1.0, True), (0.25, False))  # hold, hold_in_fill_only
NUM_REFINED = 3
NUM_ENOUGH = 8  # recipes to try for a shorter makespan when the span is proven to be shortest
LIST_SCHEDULE_COST = 5  # it takes five times as long as timing the order that it returns


def _search(problem: SearchProblem, budget: SearchBudget, rng: random.Random) -> Candidate:
    """Try every recipe, the best orders with every profile, local search, then random recipes."""
    pool = [Candidate.of(problem, _sequential_order(problem))]

    def is_over() -> bool:
        return budget.is_exhausted or _best(pool).reaches(problem.bounds)

    def is_proven() -> bool:
        return _best(pool).reaches(Bounds(inf, problem.bounds.span))

    for number, recipe in enumerate(_first_recipes(problem)):
        if is_over() or (number >= NUM_ENOUGH and is_proven()):
            break
        pool += _candidates(problem, recipe, budget)
    if is_proven():
        return _best(pool)
    leaders = sorted(pool, key=_score)[:NUM_REFINED]
    for leader, profile in product(leaders, PROFILES):
        if not is_over() and not is_proven():
            recipe = OrderRecipe(follow_order(problem, leader.lanes), profile)
            pool += _candidates(problem, recipe, budget)
    leaders = sorted(pool, key=_score)[:NUM_REFINED]
    pool = [improve(problem, leader, budget.spend) for leader in leaders]
    while not is_over() and not is_proven():
        found = _candidates(problem, _random_recipe(problem, _best(pool), rng), budget)
        pool = [_best(pool)] + [improve(problem, one, budget.spend) for one in found]
    return _best(pool)


def _best(pool: list[Candidate]) -> Candidate:
    return min(pool, key=_score)


def _score(candidate: Candidate) -> tuple[float, float, float]:
    return candidate.score


def _candidates(
    problem: SearchProblem, recipe: OrderRecipe, budget: SearchBudget
) -> list[Candidate]:
    """Return the order of a recipe in a list, which is empty if the recipe fails."""
    first, last = recipe.eagerness
    steps = max(1, problem.num_ranks - 1)
    eagerness = [first + (last - first) * rank / steps for rank in range(problem.num_ranks)]
    budget.spend(LIST_SCHEDULE_COST * problem.num_tasks)
    lanes = list_schedule(problem, recipe.rule, eagerness)
    return [Candidate.of(problem, lanes)] if lanes else []


def _first_recipes(problem: SearchProblem) -> Iterator[OrderRecipe]:
    for order in _known_orders(problem):
        yield OrderRecipe(follow_order(problem, order))
        yield OrderRecipe(follow_order(problem, order), (0.2, 0.0))
    for (hold, fill_only), prefer in product(HOLDS, PREFERENCES):
        if prefer == "turns" and problem.num_stages == problem.num_ranks:
            continue  # with one chunk there are no turns to take
        rule = by_policy(problem, PriorityPolicy(prefer, hold, fill_only))
        yield OrderRecipe(rule, (1.0, 1.0))
        yield OrderRecipe(rule)


def _known_orders(problem: SearchProblem) -> Iterator[Lanes]:
    """Yield handcrafted schedules for the placement: their order of F and I is often the best."""
    families: dict[Placement, tuple[Callable[[int, int], Schedule], ...]] = {
        loop(problem.num_ranks): (zb_h2, zb_h1),
        loop(problem.num_ranks, 2): (interleaved_1f1b,),
        wave(problem.num_ranks): (zbv, v_half, v_min),
    }
    for family in families.get(problem.placement, ()):
        yield problem.lanes(family(problem.num_ranks, problem.num_microbatches))


def _sequential_order(problem: SearchProblem) -> Lanes:
    """Return the order that always fits: each micro-batch is complete before the next begins."""
    lanes: Lanes = [[] for _ in problem.limits]
    row, placement = problem.numbering.row, problem.placement
    for microbatch in range(problem.num_microbatches):
        for stage in range(problem.num_stages):
            lanes[placement[stage]].append(row(Kind.F, stage) + microbatch)
        for stage in reversed(range(problem.num_stages)):
            lanes[placement[stage]] += [row(kind, stage) + microbatch for kind in (Kind.I, Kind.W)]
    return lanes


def _random_recipe(problem: SearchProblem, best: Candidate, rng: random.Random) -> OrderRecipe:
    profile = (rng.random(), rng.random())
    if rng.random() < 0.5:
        return OrderRecipe(follow_order(problem, best.lanes), profile)
    policy = PriorityPolicy(rng.choice(PREFERENCES), rng.random(), rng.random() < 0.5)
    return OrderRecipe(by_policy(problem, policy), profile)
