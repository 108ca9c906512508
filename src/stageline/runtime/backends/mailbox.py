"""Messages between ranks in one process: passed by reference, taken once, by their send."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Lock

from stageline.runtime.engine.loop import Message, Parcel
from stageline.runtime.optimizers.late_clipping import Norms
from stageline.runtime.optimizers.speculation import norms_for
from stageline.schedules.action import Action
from stageline.schedules.placement import Placement


class Stopped(Exception):  # noqa: N818  no error of its own: another rank failed
    """Raised in a rank that waits for a message that will not come."""


class Mailbox:
    """What was sent to one rank and not yet taken. State: the queue, and what came out of turn.

    Each rank has its own, so that a message wakes the one thread that may wait for it.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Parcel, Message] | None] = SimpleQueue()
        self.early: dict[Parcel, Message] = {}

    def put(self, parcel: Parcel, message: Message) -> None:
        self.queue.put((parcel, message))

    def take(self, parcel: Parcel) -> Message:
        """Wait for a message; raises `Stopped` once the mailbox is closed."""
        while parcel not in self.early:
            found = self.queue.get()
            if found is None:
                raise Stopped
            self.early[found[0]] = found[1]
        return self.early.pop(parcel)

    def close(self) -> None:
        """Wake the rank if it waits: nothing more will come."""
        self.queue.put(None)


class Poll:
    """The norms that ranks tell. State: those of mini-batches that some have not told yet."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.told: dict[int, list[Norms]] = {}
        self.lock = Lock()

    def tell(self, minibatch: int, norms: Norms) -> Norms | None:
        """Those of all ranks, to the last one that tells."""
        with self.lock:
            told = self.told.setdefault(minibatch, [])
            told.append(norms)
            if len(told) < self.num_ranks:
                return None
            del self.told[minibatch]
        return {number: norm for each in told for number, norm in each.items()}


class PostOffice:
    """The mailboxes of all ranks, for the messages of one stream. State: whether it is over."""

    def __init__(self, placement: Placement, num_ranks: int) -> None:
        self.placement = placement
        self.mailboxes = [Mailbox() for _ in range(num_ranks)]
        self.poll = Poll(num_ranks)
        self.is_closed = False

    def send(self, parcel: Parcel, message: Message) -> None:
        """Raises `Stopped` once it is closed: a rank that only sends must stop as well."""
        if self.is_closed:
            raise Stopped
        self.mailboxes[self.placement[parcel[1].peer]].put(parcel, message)

    def expect(self, minibatch: int, receive: Action) -> None:
        """A mailbox takes what comes."""

    def reduce(self, stage: int) -> None:
        """There is one replica."""

    def tell(self, rank: int, minibatch: int, norms: Norms) -> None:  # noqa: ARG002  counted
        if everywhere := self.poll.tell(minibatch, norms):
            for other, mailbox in enumerate(self.mailboxes):
                mailbox.put((minibatch, norms_for(other)), Message(everywhere, 0.0))

    def close(self) -> None:
        self.is_closed = True
        for mailbox in self.mailboxes:
            mailbox.close()
