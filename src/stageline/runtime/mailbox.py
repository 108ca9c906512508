"""Messages between ranks in one process: passed by reference, taken once, by their send."""

from __future__ import annotations

from queue import SimpleQueue

from stageline.runtime.executor import Message
from stageline.schedules.action import Action
from stageline.schedules.placement import Placement


class Stopped(Exception):  # noqa: N818  no error of its own: another rank failed
    """Raised in a rank that waits for a message that will not come."""


class Lost(Exception):  # noqa: N818  what it means is for others to say
    """Raised in a rank whose connection to another broke."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class Mailbox:
    """What was sent to one rank and not yet taken. State: the queue, and what came out of turn.

    Each rank has its own, so that a message wakes the one thread that may wait for it.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit  # seconds that a message may take; None: it cannot be lost on the way
        self.queue: SimpleQueue[tuple[Action, Message] | Lost | None] = SimpleQueue()
        self.early: dict[Action, Message] = {}

    def put(self, send: Action, message: Message) -> None:
        self.queue.put((send, message))

    def take(self, send: Action) -> Message:
        """Wait for a message; raises `Stopped` once the mailbox is closed, `Lost`, or `Empty`."""
        while send not in self.early:
            found = self.queue.get(timeout=self.limit)
            if found is None:
                raise Stopped
            if isinstance(found, Lost):
                raise found
            self.early[found[0]] = found[1]
        return self.early.pop(send)

    def lose(self, rank: int, reason: str) -> None:
        """Wake the rank if it waits: from another one nothing more will come."""
        self.queue.put(Lost(rank, reason))

    def close(self) -> None:
        """Wake the rank if it waits: nothing more will come."""
        self.queue.put(None)


class PostOffice:
    """The mailboxes of all ranks, for the messages of one step. State: whether it is over."""

    def __init__(self, placement: Placement, num_ranks: int) -> None:
        self.placement = placement
        self.mailboxes = [Mailbox() for _ in range(num_ranks)]
        self.is_closed = False

    def send(self, action: Action, message: Message) -> None:
        """Raises `Stopped` once it is closed: a rank that only sends must stop as well."""
        if self.is_closed:
            raise Stopped
        self.mailboxes[self.placement[action.peer]].put(action, message)

    def expect(self, receive: Action) -> None:
        """A mailbox takes what comes."""

    def reduce(self, stage: int) -> None:
        """There is one replica."""

    def close(self) -> None:
        self.is_closed = True
        for mailbox in self.mailboxes:
            mailbox.close()
