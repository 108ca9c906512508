"""Improve an order by small moves along its critical path, as is done for job shops.

The path that makes a span long runs backwards in time from the rank's last task, each time to what
the task had to wait for: a message, or the task before it on its rank. Tasks of one rank that
follow each other on the path form a block. Only a move within a block can shorten the path: a W
goes behind the block, its last task goes forward, or two neighbours change places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from stageline.schedules.precedence import NEVER, Run, run_lanes
from stageline.schedules.search.problem import Candidate, Problem


class Move(NamedTuple):
    """Take the task at one position of a rank's lane and put it at another."""

    rank: int
    source: int
    target: int


def improve(problem: Problem, candidate: Candidate, may_spend: Callable[[int], bool]) -> Candidate:
    """Take the first move that helps, again and again, until none does or nothing may be spent.

    `may_spend` is told how many tasks an evaluation costs.
    """
    while candidate.span > problem.bounds.span:
        better = _first_better(problem, candidate, may_spend)
        if better is None:
            return candidate
        candidate = better
    return candidate


def _first_better(
    problem: Problem, candidate: Candidate, may_spend: Callable[[int], bool]
) -> Candidate | None:
    for move in _moves(problem, candidate):
        lane = list(candidate.lanes[move.rank])
        lane.insert(move.target, lane.pop(move.source))
        if not problem.fits(lane, move.rank):
            continue
        kept = _kept(candidate, move)
        if not may_spend(problem.num_tasks - sum(kept)):
            return None
        moved = _moved(problem, candidate, move.rank, lane, kept)
        if moved and moved.score < candidate.score:
            return moved
    return None


def _moves(problem: Problem, candidate: Candidate) -> Iterator[Move]:
    first_weight = 2 * problem.num_stages * problem.num_microbatches
    for rank, block in _critical_blocks(problem, candidate):
        lane, last, inner = candidate.lanes[rank], block[-1], block[-2::-1]
        moves = [Move(rank, position, last) for position in inner if lane[position] >= first_weight]
        moves += [Move(rank, last, position) for position in inner]
        moves += [Move(rank, a, b) for a, b in pairwise(block)]
        yield from (move for move in dict.fromkeys(moves) if _is_legal(problem, lane, move))


def _critical_blocks(problem: Problem, candidate: Candidate) -> Iterator[tuple[int, range]]:
    """A rank and positions in its lane, two or more, from the end of the longest span backwards."""
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
        waited = (b for b, delay in problem.waits.of(task) if ends[b] + delay >= starts[task])
        before = next(waited, None)
        if before is None:
            return
        rank = problem.homes[before]
        first = bisect_left(lanes[rank], starts[before], key=starts.__getitem__)
        first = last = lanes[rank].index(before, first)


def _is_legal(problem: Problem, lane: list[int], move: Move) -> bool:
    """A task may not pass one of the same micro-batch and stage, nor one of its kind and stage."""
    size, num_stages = problem.num_microbatches, problem.num_stages

    def may_pass(task: int, other: int) -> bool:
        (phase, stage), (other_phase, other_stage) = (
            divmod(t // size, num_stages) for t in (task, other)
        )
        return stage != other_stage or (phase != other_phase and task % size != other % size)

    low, high = sorted((move.source, move.target))
    task = lane[move.source]
    return all(may_pass(task, other) for other in lane[low : high + 1] if other != task)


def _kept(candidate: Candidate, move: Move) -> list[int]:
    """By rank, how many tasks stay as they are: those that start before the first one touched."""
    changed = min(move.source, move.target)
    time = candidate.starts[candidate.lanes[move.rank][changed]]
    kept = [bisect_left(lane, time, key=candidate.starts.__getitem__) for lane in candidate.lanes]
    kept[move.rank] = changed
    return kept


def _moved(
    problem: Problem, candidate: Candidate, rank: int, lane: list[int], kept: list[int]
) -> Candidate | None:
    """The candidate with another order on one rank, unless that is a deadlock."""
    lanes = [*candidate.lanes]
    lanes[rank] = lane
    begun = Run([*candidate.starts], [*candidate.ends], kept)
    for tasks, num_kept in zip(lanes, kept, strict=True):
        for task in tasks[num_kept:]:
            begun.ends[task] = NEVER
    run = run_lanes(lanes, problem.durations, problem.waits, begun)
    return Candidate(lanes, run.starts, run.ends) if run.is_complete(lanes) else None
