"""Build a rank's row from steps without micro-batches, which are numbered in ascending order.

In every family a stage runs micro-batches in ascending order, forwards and gradients alike. So an
action's micro-batch is the number of earlier actions of the same kind on its stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from stageline.schedules.action import Action, Kind

Step = tuple[int, Kind]  # an action without its micro-batch
HALVES = {Kind.B: (Kind.I, Kind.W)}


def number_steps(steps: Iterable[Step]) -> Iterator[Action]:
    """Yield an action for each step; B counts as an I and a W.

    >>> print(*number_steps([(2, Kind.F), (2, Kind.F), (2, Kind.B), (2, Kind.I), (2, Kind.W)]))
    2F0 2F1 2B0 2I1 2W1
    """
    seen: Counter[Step] = Counter()
    for stage, kind in steps:
        halves = HALVES.get(kind, (kind,))
        yield Action(stage, kind, seen[stage, halves[0]])
        for half in halves:
            seen[stage, half] += 1


def alternate(
    forwards: Sequence[Step], backwards: Iterable[Sequence[Step]], num_ahead: int
) -> Iterator[Step]:
    """Yield `num_ahead` forwards, then in turn one forward, if any is left, and one backward."""
    yield from forwards[:num_ahead]
    for forward, backward in zip_longest(forwards[num_ahead:], backwards):
        if forward:
            yield forward
        yield from backward
