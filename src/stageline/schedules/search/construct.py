"""Construct an order by walking through time: whenever a rank is free, a policy picks what it does.

    I    as soon as its gradient is there: others wait for what it sends
    F    if memory allows, and the policy does not hold it back
    W    when there is nothing else to do, or when memory is full

A rank that has only W left to do waits a little if something better is known to arrive before the W
would end: `patience` says how much of the W may be in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from stageline.schedules.search.problem import Lanes, Problem

NOT_YET = float("inf")


class Policy(NamedTuple):
    """How to pick: see the fields."""

    patience: float = 0.0  # wait for an arrival if a W started now would end later by this share of W
    forward_first: bool = False  # a ready F goes before a ready I, as long as memory lasts
    reach: float = 1.0  # share of the limit that forwards may fill
    higher_first: bool = True  # among ready F of several chunks, the later stage first
    backlog: int = 1_000_000_000  # at most so many W wait while others are ready


def construct(problem: Problem, policy: Policy) -> Lanes | None:
    """The order that the policy leads to, or None if it gets stuck."""
    walk = _Walk(problem, policy)
    return walk.lanes if walk.run() else None
