"""Improve an order by small moves along its critical path, as in job-shop scheduling.

The critical path of a span goes backwards in time from the rank's last task, in each step to what
the task had to wait for: a message, or the previous task on its rank. Consecutive tasks of one rank
on the path form a block. Only a move within a block can shorten the path: moving a W behind the
block, moving the last task to an earlier position, or swapping two neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from stageline.schedules.search.problem import Candidate, SearchProblem
from stageline.schedules.task_graph import NEVER, LaneTimes, run_lanes


class TaskMove(NamedTuple):
    """A move of one task of a rank's lane to another position."""

    rank: int
    source: int
    target: int


def improve(
    problem: SearchProblem, candidate: Candidate, spend: Callable[[int], bool]
) -> Candidate:
    """Apply the first move that improves the order, until none does or the budget is exhausted.

    `spend` takes the number of tasks that an evaluation costs, as `SearchBudget.spend` does.
    """
    while candidate.span > problem.bounds.span:
        better = _first_better(problem, candidate, spend)
        if better is None:
            return candidate
        candidate = better
    return candidate


def _first_better(
    problem: SearchProblem, candidate: Candidate, spend: Callable[[int], bool]
) -> Candidate | None:
    for move in _moves(problem, candidate):
        lane = list(candidate.lanes[move.rank])
        lane.insert(move.target, lane.pop(move.source))
        if not problem.fits(lane, move.rank):
            continue
        unchanged = _unchanged(candidate, move)
        if not spend(problem.num_tasks - sum(unchanged)):
            return None
        moved = _moved(problem, candidate, move.rank, lane, unchanged)
        if moved and moved.score < candidate.score:
            return moved
    return None


def _moves(problem: SearchProblem, candidate: Candidate) -> Iterator[TaskMove]:
    first_weight = 2 * problem.num_stages * problem.num_microbatches
    for rank, block in _critical_blocks(problem, candidate):
        lane, last, inner = candidate.lanes[rank], block[-1], block[-2::-1]
        moves = [
            TaskMove(rank, position, last) for position in inner if lane[position] >= first_weight
        ]
        moves += [TaskMove(rank, last, position) for position in inner]
        moves += [TaskMove(rank, a, b) for a, b in pairwise(block)]
        yield from (move for move in dict.fromkeys(moves) if _is_legal(problem, lane, move))


def _critical_blocks(problem: SearchProblem, candidate: Candidate) -> Iterator[tuple[int, range]]:
    """Yield blocks as a rank and two or more positions, from the end of the longest span back."""
    lanes, starts, ends = candidate.lanes, candidate.starts, candidate.ends
    rank = max(range(len(lanes)), key=candidate.rank_span)
    first = last = len(lanes[rank]) - 1
    while True:
        task = lanes[rank][first]
        if first and ends[lanes[rank][first - 1]] >= starts[task]:
            first -= 1
            continue
        if first < last:
            yield rank, range(first, last + 1)
        waited = (
            b for b, delay in problem.dependencies.of(task) if ends[b] + delay >= starts[task]
        )
        before = next(waited, None)
        if before is None:
            return
        rank = problem.rank_of_task[before]
        first = bisect_left(lanes[rank], starts[before], key=starts.__getitem__)
        first = last = lanes[rank].index(before, first)


def _is_legal(problem: SearchProblem, lane: list[int], move: TaskMove) -> bool:
    """Return whether a move keeps the order of each micro-batch, and of each kind, on a stage."""
    size, num_stages = problem.num_microbatches, problem.num_stages

    def may_pass(task: int, other: int) -> bool:
        (phase, stage), (other_phase, other_stage) = (
            divmod(t // size, num_stages) for t in (task, other)
        )
        return stage != other_stage or (phase != other_phase and task % size != other % size)

    low, high = sorted((move.source, move.target))
    task = lane[move.source]
    return all(may_pass(task, other) for other in lane[low : high + 1] if other != task)


def _unchanged(candidate: Candidate, move: TaskMove) -> list[int]:
    """Return, by rank, how many tasks keep their times: those before the first one moved."""
    changed = min(move.source, move.target)
    time = candidate.starts[candidate.lanes[move.rank][changed]]
    unchanged = [
        bisect_left(lane, time, key=candidate.starts.__getitem__) for lane in candidate.lanes
    ]
    unchanged[move.rank] = changed
    return unchanged


def _moved(
    problem: SearchProblem, candidate: Candidate, rank: int, lane: list[int], unchanged: list[int]
) -> Candidate | None:
    """Return the candidate with another order on one rank, or None if that deadlocks."""
    lanes = [*candidate.lanes]
    lanes[rank] = lane
    partial = LaneTimes([*candidate.starts], [*candidate.ends], unchanged)
    for tasks, num_unchanged in zip(lanes, unchanged, strict=True):
        for task in tasks[num_unchanged:]:
            partial.ends[task] = NEVER
    run = run_lanes(lanes, problem.durations, problem.dependencies, partial)
    return Candidate(lanes, run.starts, run.ends) if run.is_complete(lanes) else None
