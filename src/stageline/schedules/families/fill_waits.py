"""Move weight gradients to where their rank would wait, without using more memory.

A forward uses the memory that the W before it freed, so no W is delayed past a forward. No other
action depends on a W: it gives way to every I, and moves to where its rank would otherwise wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from stageline.schedules.action import Action, Kind
from stageline.schedules.families.row_steps import Step


def fill_waits(rows: Sequence[Iterable[Action]], num_stages: int) -> list[list[Action]]:
    """Return rows of F, I and W with the W moved, assuming that every action takes one slot."""
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
    """Yield the action of a rank in each slot; None where it must wait."""
    pending: deque[Action] = deque()
    num_due = 0  # weight gradients that came before this position and have not run yet
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
