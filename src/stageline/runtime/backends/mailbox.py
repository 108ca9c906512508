"""Messages between ranks in one process: passed by reference, taken once, by their key."""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue
from threading import Lock

from torch import Tensor

from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement

Numbers = dict[int, Tensor]


class RankStopped(Exception):  # noqa: N818  it is no error of this rank's: another one failed
    """Raised in a rank that waits for a message that will not come."""


class Mailbox:
    """The messages for one rank. State: the queue, and what came before it was asked for.

    Each rank has its own, so that a message wakes the one thread that may wait for it.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[MessageKey, Message] | None] = SimpleQueue()
        self.early: dict[MessageKey, Message] = {}

    def put(self, key: MessageKey, message: Message) -> None:
        self.queue.put((key, message))

    def take(self, key: MessageKey) -> Message:
        """Wait for a message; raise `RankStopped` once the mailbox is closed."""
        while key not in self.early:
            found = self.queue.get()
            if found is None:
                raise RankStopped
            self.early[found[0]] = found[1]
        return self.early.pop(key)

    def close(self) -> None:
        """Wake the rank if it waits: nothing more will come."""
        self.queue.put(None)


class Meetings:
    """Numbers that all ranks exchange. State: those of meetings that are not complete."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.brought: dict[tuple[int, Kind], list[Mapping[int, Tensor]]] = {}
        self.lock = Lock()

    def join(self, key: MessageKey, numbers: Mapping[int, Tensor]) -> Numbers | None:
        """Return the numbers of all ranks to the last one that joins, and None to the others."""
        meeting = key[0], key[1].kind
        with self.lock:
            brought = self.brought.setdefault(meeting, [])
            brought.append(numbers)
            if len(brought) < self.num_ranks:
                return None
            del self.brought[meeting]
        return {number: value for each in brought for number, value in each.items()}

    def answers(self, key: MessageKey, everyone: Numbers) -> list[tuple[MessageKey, Message]]:
        """Return the message to each rank."""
        position, action = key
        message = Message(everyone, 0.0)
        return [((position, Action(r, action.kind)), message) for r in range(self.num_ranks)]


class PostOffice:
    """The mailboxes of all ranks, for the messages of one stream. State: whether it is over."""

    def __init__(self, placement: Placement, num_ranks: int) -> None:
        self.placement = placement
        self.mailboxes = [Mailbox() for _ in range(num_ranks)]
        self.meetings = Meetings(num_ranks)
        self.is_closed = False

    def send(self, key: MessageKey, message: Message) -> None:
        """Raise `RankStopped` once it is closed: a rank that only sends must stop as well."""
        if self.is_closed:
            raise RankStopped
        self.mailboxes[self.placement[key[1].peer]].put(key, message)

    def expect(self, minibatch: int, receive: Action) -> None:
        """Do nothing: a mailbox takes what comes."""

    def meet(self, rank: int, key: MessageKey, numbers: Mapping[int, Tensor]) -> None:  # noqa: ARG002
        everyone = self.meetings.join(key, numbers)
        if everyone is not None:
            answers = self.meetings.answers(key, everyone)
            for mailbox, (own_key, message) in zip(self.mailboxes, answers, strict=True):
                mailbox.put(own_key, message)

    def close(self) -> None:
        self.is_closed = True
        for mailbox in self.mailboxes:
            mailbox.close()
