"""Rules that choose the next F or I of a rank: by a given order, or by a policy."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from stageline.schedules.action import Kind
from stageline.schedules.search.list_scheduling import NOTHING, YIELDING, PartialOrder, PriorityRule
from stageline.schedules.search.problem import Lanes, SearchProblem


def follow_order(problem: SearchProblem, lanes: Lanes) -> PriorityRule:
    """Return the rule that keeps the order of F and I in `lanes`; only W are placed anew."""
    num_forwards = problem.num_stages * problem.num_microbatches
    orders = [[task for task in lane if task < 2 * num_forwards] for lane in lanes]
    memory_changes, tolerance = problem.memory_changes, problem.tolerance

    def choose(state: PartialOrder, rank: int, now: float) -> tuple[int, float]:
        position = len(state.lanes[rank]) - state.num_weights[rank]
        if position == len(orders[rank]):
            return NOTHING, inf
        task = orders[rank][position]
        if not state.fits(rank, memory_changes[task]):
            return NOTHING, inf
        arrival = state.arrivals[task]
        return (task, now) if arrival <= now + tolerance else (NOTHING, arrival)

    return choose


class PriorityPolicy(NamedTuple):
    """The preference of a rank among the F and I that are ready.

    `hold` keeps an F from starting if a preferred action arrives before that fraction of it is
    done: the F would delay that action, and everything that depends on it on other ranks.
    """

    prefer: str = "inputs"  # one of PREFERENCES
    hold: float = 0.0
    hold_in_fill_only: bool = False  # until the rank has run its first I


PREFERENCES = ("inputs", "turns", "forwards")  # turns: F of later chunks, then I, then other F


def by_policy(problem: SearchProblem, policy: PriorityPolicy) -> PriorityRule:
    """Return the rule of a policy.

    Later stages go first, because other ranks wait for their results. An F must leave memory for
    the rest of its micro-batch on the same rank.
    """
    rankings = [_ranking(stages, policy.prefer) for stages in problem.stages]
    max_in_flight, memory = _max_in_flight(problem), _memory_of_forward(problem)
    size, first_input = problem.num_microbatches, problem.num_stages * problem.num_microbatches

    def may_start(state: PartialOrder, rank: int, stage: int, task: int) -> bool:
        in_flight = task + first_input - state.next_input[stage]
        return in_flight < max_in_flight[stage] and state.fits(rank, memory[stage])

    def must_yield(state: PartialOrder, rank: int, task: int, wait: float) -> bool:
        top = problem.stages[rank][-1]
        if policy.hold_in_fill_only and state.next_input[top] > first_input + top * size:
            return False
        return wait < policy.hold * problem.durations[task]

    def choose(state: PartialOrder, rank: int, now: float) -> tuple[int, float]:
        soonest = inf
        for is_input, stage in rankings[rank]:
            task = state.next_input[stage] if is_input else state.next_forward[stage]
            if task == (is_input * first_input) + (stage + 1) * size:
                continue
            if not is_input and not may_start(state, rank, stage, task):
                continue
            arrival = state.arrivals[task]
            if arrival > now + problem.tolerance:
                soonest = min(soonest, arrival)
            elif is_input or not must_yield(state, rank, task, soonest - now):
                return task, now
            else:
                return YIELDING, soonest
        return NOTHING, soonest

    return choose


def _ranking(stages: tuple[int, ...], prefer: str) -> list[tuple[bool, int]]:
    """Return (is I, stage) pairs, the most preferred first."""
    inputs = [(True, stage) for stage in reversed(stages)]
    forwards = [(False, stage) for stage in reversed(stages)]
    if prefer == "inputs":
        return inputs + forwards
    if prefer == "forwards":
        return forwards + inputs
    return forwards[:-1] + inputs + forwards[-1:]


def _memory_of_forward(problem: SearchProblem) -> list[float]:
    """Return, by stage, the memory of an F and of its micro-batch's later F on the same rank."""
    return [
        sum(problem.activation[s] for s in problem.stages[rank] if s >= stage)
        for stage, rank in enumerate(problem.placement)
    ]


def _max_in_flight(problem: SearchProblem) -> list[float]:
    """Return, by stage, how many micro-batches may be in flight within its share of memory.

    At a constant rate, the number in flight is proportional to the lifetime (Little's law). The
    lifetime of an activation is the path from its stage to the last one and back.
    """
    durations, transfer_time = problem.times.durations, problem.times.transfer_time
    lifetimes, lifetime = [0.0] * problem.num_stages, 0.0
    for stage in reversed(range(problem.num_stages)):
        if stage < problem.num_stages - 1:
            lifetime += transfer_time(stage, stage + 1) + transfer_time(stage + 1, stage)
        lifetime += durations[Kind.F][stage] + durations[Kind.I][stage]
        lifetimes[stage] = lifetime
    numbers = []
    for stage, rank in enumerate(problem.placement):
        needed = sum(lifetimes[s] * problem.activation[s] for s in problem.stages[rank])
        share = problem.limits[rank] * lifetimes[stage] / needed if needed else inf
        numbers.append(max(1.0, share + 0.5))
    return numbers
