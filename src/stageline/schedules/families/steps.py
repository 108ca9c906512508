"""A rank's row told by what it does and where: which micro-batch goes without saying.

Every stage takes the micro-batches in ascending order, forwards and gradients alike, in every
family. So an action's micro-batch is the number of actions of its kind that the stage ran before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from stageline.schedules.action import Action, Kind

Step = tuple[int, Kind]  # a stage, and what is done there
HALVES = {Kind.B: (Kind.I, Kind.W)}


def numbered(steps: Iterable[Step]) -> Iterator[Action]:
    """Every step with its micro-batch; B counts as an I and a W.

    >>> print(*numbered([(2, Kind.F), (2, Kind.F), (2, Kind.B), (2, Kind.I), (2, Kind.W)]))
    2F0 2F1 2B0 2I1 2W1
    """
    seen: Counter[Step] = Counter()
    for stage, kind in steps:
        halves = HALVES.get(kind, (kind,))
        yield Action(stage, kind, seen[stage, halves[0]])
        for half in halves:
            seen[stage, half] += 1


def alternated(
    forwards: Sequence[Step], backwards: Iterable[Sequence[Step]], num_ahead: int
) -> Iterator[Step]:
    """`num_ahead` forwards, then in turn one forward, if any is left, and one backward."""
    yield from forwards[:num_ahead]
    for forward, backward in zip_longest(forwards[num_ahead:], backwards):
        if forward:
            yield forward
        yield from backward
