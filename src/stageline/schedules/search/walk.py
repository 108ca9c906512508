"""Make an order by walking through time: whenever a rank is free, it picks what to do next.

First comes an F or an I, as a chooser says. If there is none to run now, the rank does a W, unless
something is known to arrive before that W would end; then it depends on the rank's eagerness. At 0
no W ever stands in the way of what arrives, at 1 the rank never waits while it has a W to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from stageline.schedules.action import Kind
from stageline.schedules.bounds import ROUNDING
from stageline.schedules.search.problem import Lanes, Problem

NOTHING = -1
HELD = -2  # an F is there, but makes way for what arrives
# For a rank that is free now: the F or I that it runs, or NOTHING or HELD and the next arrival.
Chooser = Callable[["Walk", int, float], tuple[int, float]]


class Walk:
    """How far the walk has come: what each rank did and holds, what arrived, and what is next."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_forwards = num_forwards = problem.num_stages * problem.num_microbatches
        first_stage = [0.0] * problem.num_microbatches
        self.arrivals = first_stage + [inf] * (2 * num_forwards - len(first_stage))  # for F and I
        stages = range(problem.num_stages)
        self.next_forward = [problem.numbering.row(Kind.F, stage) for stage in stages]
        self.next_input = [problem.numbering.row(Kind.I, stage) for stage in stages]
        self.lanes: Lanes = [[] for _ in problem.limits]
        self.held = [0.0] * problem.num_ranks
        self.weights: Lanes = [[] for _ in problem.limits]  # in the order of their I, which is ...
        self.num_weights = [0] * problem.num_ranks  # ... the order in which they run

    def fits(self, rank: int, size: float) -> bool:
        return self.held[rank] + size <= self.problem.limits[rank] * ROUNDING

    def next_weight(self, rank: int) -> int:
        weights, done = self.weights[rank], self.num_weights[rank]
        return weights[done] if done < len(weights) else NOTHING

    def do(self, rank: int, task: int) -> None:
        self.lanes[rank].append(task)
        self.held[rank] += self.problem.takes[task]
        if task < self.num_forwards:
            self.next_forward[self.problem.stage_of(task)] += 1
        elif task < 2 * self.num_forwards:
            self.next_input[self.problem.stage_of(task)] += 1
            self.weights[rank].append(task + self.num_forwards)
        else:
            self.num_weights[rank] += 1


def walk(problem: Problem, choose: Chooser, eagerness: Sequence[float]) -> Lanes | None:
    """The order of every rank, or None if the choices lead nowhere."""
    state, durations, hops, homes = Walk(problem), problem.durations, problem.hops, problem.homes
    free = [0.0] * problem.num_ranks
    events = [(0.0, rank) for rank in range(problem.num_ranks)]
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        task, arrival = choose(state, rank, now)
        if task < 0:
            share = 1.0 if task == HELD else 1 - eagerness[rank]
            task = state.next_weight(rank)
            if task == NOTHING or arrival - now < share * durations[task]:
                if arrival < inf:
                    heappush(events, (arrival, rank))
                continue
        state.do(rank, task)
        end = free[rank] = now + durations[task]
        heappush(events, (end, rank))
        follower, delay = hops[task]
        if follower != NOTHING:
            state.arrivals[follower] = end + delay
            home = homes[follower]
            heappush(events, (max(end + delay, free[home]), home))
    complete = sum(map(len, state.lanes)) == problem.num_tasks
    return state.lanes if complete else None
