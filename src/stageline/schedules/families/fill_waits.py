"""Weight gradients moved to where their rank would wait, without holding more in memory.

A forward takes the memory that the W before it freed, so no W is put off past a forward. Nothing
else waits for a W: it makes way for every I, and runs sooner or later, where its rank would wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from stageline.schedules.action import Action, Kind
from stageline.schedules.families.steps import Step


def fill_waits(rows: Sequence[Iterable[Action]], num_stages: int) -> list[list[Action]]:
    """Rows of F, I and W that complete, with the W moved; all are taken to last one slot."""
    done: Counter[Step] = Counter()

    def is_ready(action: Action) -> bool:
        stage, kind, microbatch, _, _ = action
        source = stage - 1 if kind is Kind.F else stage + 1
        return not 0 <= source < num_stages or done[source, kind] > microbatch

    filled: list[list[Action]] = [[] for _ in rows]
    for slot in zip_longest(*(_lane(row, is_ready) for row in rows)):
        for row, action in zip(filled, slot, strict=True):
            if action:
                row.append(action)
                done[action.stage, action.kind] += 1
    return filled


def _lane(row: Iterable[Action], is_ready: Callable[[Action], bool]) -> Iterator[Action | None]:
    """What a rank does in each slot; None where it has to wait."""
    pending: deque[Action] = deque()
    num_due = 0  # weight gradients that stood before this place and are still to run
    for action in row:
        if action.kind is Kind.W:
            num_due += 1
            continue
        while (action.kind is Kind.F and num_due > 0) or not is_ready(action):
            num_due -= bool(pending)
            yield pending.popleft() if pending else None
        yield action
        if action.kind is Kind.I:
            pending.append(action._replace(kind=Kind.W))
    yield from pending
