"""Messages between ranks in one process: passed by reference, taken once, by their send."""

from __future__ import annotations

from queue import SimpleQueue

from stageline.runtime.executor import Message
from stageline.schedules.action import Action
from stageline.schedules.placement import Placement


class Stopped(Exception):  # noqa: N818  no error of its own: another rank failed
    """Raised in a rank that waits for a message that will not come."""


class Mailbox:
    """What was sent to one rank and not yet taken. State: the queue, and what came out of turn.

    Each rank has its own, so that a message wakes the one thread that may wait for it.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Action, Message] | None] = SimpleQueue()
        self.early: dict[Action, Message] = {}

    def put(self, send: Action, message: Message) -> None:
        self.queue.put((send, message))

    def take(self, send: Action) -> Message:
        """Wait for a message; raises `Stopped` once the mailbox is closed."""
        while send not in self.early:
            found = self.queue.get()
            if found is None:
                raise Stopped
            self.early[found[0]] = found[1]
        return self.early.pop(send)

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
