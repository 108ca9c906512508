"""Build an order by list scheduling: whenever a rank is free, it chooses its next task.

A priority rule chooses an F or I. If none can run now, the rank runs a W, unless it is known that
an F or I will arrive before that W would end; then it depends on the rank's eagerness. At 0 a W
never delays what arrives, at 1 the rank never waits while it has a W to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from stageline.schedules.action import Kind
from stageline.schedules.lower_bounds import ROUNDING
from stageline.schedules.search.problem import Lanes, SearchProblem

NOTHING = -1
YIELDING = -2  # an F is ready, but gives way to what arrives
# Returns the F or I that a free rank runs now, or NOTHING or YIELDING and the next arrival.
PriorityRule = Callable[["PartialOrder", int, float], tuple[int, float]]


class PartialOrder:
    """The state of list scheduling: the tasks done, memory held, arrivals and next tasks."""

    def __init__(self, problem: SearchProblem) -> None:
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

    def run(self, rank: int, task: int) -> None:
        self.lanes[rank].append(task)
        self.held[rank] += self.problem.memory_changes[task]
        if task < self.num_forwards:
            self.next_forward[self.problem.stage_of(task)] += 1
        elif task < 2 * self.num_forwards:
            self.next_input[self.problem.stage_of(task)] += 1
            self.weights[rank].append(task + self.num_forwards)
        else:
            self.num_weights[rank] += 1


def list_schedule(
    problem: SearchProblem, rule: PriorityRule, eagerness: Sequence[float]
) -> Lanes | None:
    """Return the order of every rank, or None if the choices of the rule end in a deadlock."""
    state, durations = PartialOrder(problem), problem.durations
    successors, rank_of_task = problem.successors, problem.rank_of_task
    free = [0.0] * problem.num_ranks
    events = [(0.0, rank) for rank in range(problem.num_ranks)]
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        task, arrival = rule(state, rank, now)
        if task < 0:
            share = 1.0 if task == YIELDING else 1 - eagerness[rank]
            task = state.next_weight(rank)
            if task == NOTHING or arrival - now < share * durations[task]:
                if arrival < inf:
                    heappush(events, (arrival, rank))
                continue
        state.run(rank, task)
        end = free[rank] = now + durations[task]
        heappush(events, (end, rank))
        follower, delay = successors[task]
        if follower != NOTHING:
            state.arrivals[follower] = end + delay
            target = rank_of_task[follower]
            heappush(events, (max(end + delay, free[target]), target))
    complete = sum(map(len, state.lanes)) == problem.num_tasks
    return state.lanes if complete else None
