"""Ways to pick the next F or I: follow a given order, or a policy that looks at what is there."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from stageline.schedules.action import Kind
from stageline.schedules.search.problem import Lanes, Problem
from stageline.schedules.search.walk import HELD, NOTHING, Chooser, Walk


def follow(problem: Problem, lanes: Lanes) -> Chooser:
    """The order of F and I in `lanes`; only the W are placed anew."""
    num_forwards = problem.num_stages * problem.num_microbatches
    orders = [[task for task in lane if task < 2 * num_forwards] for lane in lanes]
    takes, instant = problem.takes, problem.instant

    def choose(state: Walk, rank: int, now: float) -> tuple[int, float]:
        position = len(state.lanes[rank]) - state.num_weights[rank]
        if position == len(orders[rank]):
            return NOTHING, inf
        task = orders[rank][position]
        if not state.fits(rank, takes[task]):
            return NOTHING, inf
        arrival = state.arrivals[task]
        return (task, now) if arrival <= now + instant else (NOTHING, arrival)

    return choose


class Policy(NamedTuple):
    """What a rank prefers among the F and I that are there.

    `hold` keeps an F from starting if something preferred arrives before that share of it is done:
    an F that is in the way delays what arrives, and all that waits for it on other ranks.
    """

    prefer: str = "inputs"  # one of PREFERENCES
    hold: float = 0.0
    hold_in_fill_only: bool = False  # that is, until the rank has run its first I


PREFERENCES = ("inputs", "turns", "forwards")  # turns: F of later chunks, then I, then other F


def by_policy(problem: Problem, policy: Policy) -> Chooser:
    """Later stages go first, because what they do is waited for; F must leave room for the rest."""
    rankings = [_ranking(stages, policy.prefer) for stages in problem.stages]
    caps, room = _caps(problem), _room(problem)
    size, first_input = problem.num_microbatches, problem.num_stages * problem.num_microbatches

    def may_start(state: Walk, rank: int, stage: int, task: int) -> bool:
        in_flight = task + first_input - state.next_input[stage]
        return in_flight < caps[stage] and state.fits(rank, room[stage])

    def is_held(state: Walk, rank: int, task: int, wait: float) -> bool:
        top = problem.stages[rank][-1]
        if policy.hold_in_fill_only and state.next_input[top] > first_input + top * size:
            return False
        return wait < policy.hold * problem.durations[task]

    def choose(state: Walk, rank: int, now: float) -> tuple[int, float]:
        soonest = inf
        for is_input, stage in rankings[rank]:
            task = state.next_input[stage] if is_input else state.next_forward[stage]
            if task == (is_input * first_input) + (stage + 1) * size:
                continue
            if not is_input and not may_start(state, rank, stage, task):
                continue
            arrival = state.arrivals[task]
            if arrival > now + problem.instant:
                soonest = min(soonest, arrival)
            elif is_input or not is_held(state, rank, task, soonest - now):
                return task, now
            else:
                return HELD, soonest
        return NOTHING, soonest

    return choose


def _ranking(stages: tuple[int, ...], prefer: str) -> list[tuple[bool, int]]:
    """(is I, stage), the most preferred first."""
    inputs = [(True, stage) for stage in reversed(stages)]
    forwards = [(False, stage) for stage in reversed(stages)]
    if prefer == "inputs":
        return inputs + forwards
    if prefer == "forwards":
        return forwards + inputs
    return forwards[:-1] + inputs + forwards[-1:]


def _room(problem: Problem) -> list[float]:
    """By stage, what an F takes, with all that its micro-batch will still take on the same rank."""
    return [
        sum(problem.activation[s] for s in problem.stages[rank] if s >= stage)
        for stage, rank in enumerate(problem.placement)
    ]


def _caps(problem: Problem) -> list[float]:
    """By stage, how many micro-batches may be in flight: each stage's share of its rank's memory.

    What passes at one rate is in flight in proportion to its life (Little's law), and the life of
    an activation is the way from its stage to the last one and back.
    """
    durations, way = problem.times.durations, problem.times.whole_way
    lives, life = [0.0] * problem.num_stages, 0.0
    for stage in reversed(range(problem.num_stages)):
        if stage < problem.num_stages - 1:
            life += way(stage, stage + 1) + way(stage + 1, stage)
        life += durations[Kind.F][stage] + durations[Kind.I][stage]
        lives[stage] = life
    caps = []
    for stage, rank in enumerate(problem.placement):
        needed = sum(lives[s] * problem.activation[s] for s in problem.stages[rank])
        share = problem.limits[rank] * lives[stage] / needed if needed else inf
        caps.append(max(1.0, share + 0.5))
    return caps
