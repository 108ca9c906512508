"""Messages between ranks in one process: passed by reference, taken once, by their send."""

from __future__ import annotations

from threading import Condition
from typing import Any

from stageline.schedules.action import Action
from stageline.schedules.placement import Placement


class Stopped(Exception):  # noqa: N818  no error of its own: another rank failed
    """Raised in a rank that waits for a message that will not come."""


class Mailbox:
    """What was sent to one rank and not yet taken. State: the messages, and whether all is over.

    Each rank has its own, so that a message wakes the one thread that may wait for it.
    """

    def __init__(self) -> None:
        self.messages: dict[Action, Any] = {}
        self.changed = Condition()
        self.is_closed = False

    def put(self, send: Action, message: Any) -> None:
        with self.changed:
            self.messages[send] = message
            self.changed.notify()

    def take(self, send: Action) -> Any:
        """Wait for a message; raises `Stopped` once the mailbox is closed."""
        with self.changed:
            while send not in self.messages:
                if self.is_closed:
                    raise Stopped
                self.changed.wait()
            return self.messages.pop(send)

    def close(self) -> None:
        """Wake the rank if it waits: nothing more will come."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()


class PostOffice:
    """The mailboxes of all ranks, for the messages of one step."""

    def __init__(self, placement: Placement, num_ranks: int) -> None:
        self.placement = placement
        self.mailboxes = [Mailbox() for _ in range(num_ranks)]

    def send(self, action: Action, message: Any) -> None:
        self.mailboxes[self.placement[action.peer]].put(action, message)

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.close()
