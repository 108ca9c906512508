"""Which tasks a rank can run on weights that may turn out to be wrong, and repeat then.

Forwards can be repeated: nothing but messages has left the rank. A rank that repeats its forwards
sends their messages again, and all ranks repeat theirs. So messages of the first attempt that were
not taken yet would be in the way of those of the second: they are taken and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stageline.runtime.engine.tasks import Task
from stageline.schedules.action import Action, Kind

GRADIENTS = (Kind.B, Kind.I, Kind.W)
SENDS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class RankSpeculation(NamedTuple):
    """The tasks of one rank, by whether they can be repeated."""

    stages: tuple[int, ...]
    first: tuple[Task, ...]  # may run on guessed weights
    rest: tuple[Task, ...]
    # messages that may be sent a second time before they were taken: the receive, its send, and
    # whether the receive is among the first
    stale: tuple[tuple[Action, Action, bool], ...]


class Speculation(NamedTuple):
    """The tasks that can be repeated if weights turn out to be wrong."""

    by_rank: tuple[RankSpeculation, ...]
    messages: frozenset[Action]  # that are sent again then

    def second(self, action: Action) -> Action:
        """Return the name of a message, or of its receive, in the second attempt."""
        send = sent_as(action) if action.kind in SENDS else action
        return action._replace(version=1) if send in self.messages else action


def speculation(tasks: Sequence[Sequence[Task]]) -> Speculation:
    """Find the forwards up to the first gradient, or to the first that needs another message.

    So a rank that repeats its forwards is sent again all that they need.
    """
    lengths = [_up_to(row, lambda task: task.action.kind in GRADIENTS) for row in tasks]
    while True:
        messages = frozenset(
            message
            for row, length in zip(tasks, lengths, strict=True)
            for task in row[:length]
            for message, is_far, _ in task.gives
            if is_far
        )

        def needs_more(task: Task, there: frozenset[Action] = messages) -> bool:
            return any(is_far and message not in there for message, is_far in task.awaits)

        shorter = [
            min(length, _up_to(row, needs_more)) for row, length in zip(tasks, lengths, strict=True)
        ]
        if shorter == lengths:
            break
        lengths = shorter
    pairs = zip(tasks, lengths, strict=True)
    by_rank = tuple(_rank_speculation(row, length, messages) for row, length in pairs)
    return Speculation(by_rank, messages)


def _rank_speculation(
    row: Sequence[Task], length: int, messages: frozenset[Action]
) -> RankSpeculation:
    def is_late(task: Task) -> bool:
        return task.action.kind in SENDS and sent_as(task.action) not in messages

    late = tuple(task for task in row[:length] if is_late(task))
    first = tuple(task for task in row[:length] if not is_late(task))
    taken = {message for task in first for message, _ in task.awaits}
    asked = {task.action for task in first}
    stale = (
        (task.action, sent_as(task.action), task.action in asked)
        for task in row
        if task.action.kind in SENDS
        and sent_as(task.action) in messages
        and sent_as(task.action) not in taken
    )
    stages = tuple(sorted({task.action.stage for task in row}))
    return RankSpeculation(stages, first, late + tuple(row[length:]), tuple(stale))


def _up_to(row: Sequence[Task], is_end: Callable[[Task], bool]) -> int:
    return next((position for position, task in enumerate(row) if is_end(task)), len(row))


def sent_as(receive: Action) -> Action:
    """Return the send of the message that a receive asks for."""
    return Action(receive.peer, SENDS[receive.kind], receive.microbatch, receive.stage)
