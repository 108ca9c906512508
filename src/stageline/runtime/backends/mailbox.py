"""Messages between ranks in one process: passed by reference, taken once, by their key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

from stageline.runtime.backends.device_ranks import DeviceRank, Parcel
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement

Numbers = Mapping[int, Any]  # tensors, or trees of them


class RankStopped(Exception):  # noqa: N818  it is no error of this rank's: another one failed
    """Raised in a rank that waits for a message that will not come."""


class Mailbox:
    """The messages for one rank. State: the queue, and what came before it was asked for.

    Each rank has its own, so that a message wakes the one thread that may wait for it.
    """

    def __init__(self, device: DeviceRank | None = None) -> None:
        self.device = device  # of the rank, if there are devices
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
        message = self.early.pop(key)
        if self.device is not None and isinstance(message.contents, Parcel):
            message = message._replace(contents=self.device.take(message.contents))
        return message

    def close(self) -> None:
        """Wake the rank if it waits: nothing more will come."""
        self.queue.put(None)


class Brought(NamedTuple):
    """The numbers that one rank contributes to a collective."""

    rank: int
    numbers: Numbers
    made: Any = None  # the event after which they are there, if the rank is on a device


Fetch = Callable[[Any, int, Any], Any]  # what a rank brought, that rank, and its event


class FetchedNumbers(Numbers):
    """The numbers of all ranks, which come to the device of a rank when it asks for them."""

    def __init__(self, brought: Sequence[Brought], fetch: Fetch) -> None:
        self.found = {number: each for each in brought for number in each.numbers}
        self.fetch = fetch

    def __getitem__(self, number: int) -> Any:
        rank, numbers, made = self.found[number]
        return self.fetch(numbers[number], rank, made)

    def __iter__(self) -> Iterator[int]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


class Meetings:
    """Numbers that all ranks exchange. State: those of meetings that are not complete."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.brought: dict[tuple[int, Kind], list[Brought]] = {}
        self.lock = Lock()

    def join(self, key: MessageKey, own: Brought) -> list[Brought] | None:
        """Return the contributions of all ranks if this is the last one to join, or else None."""
        meeting = key[0], key[1].kind
        with self.lock:
            brought = self.brought.setdefault(meeting, [])
            brought.append(own)
            if len(brought) < self.num_ranks:
                return None
            return self.brought.pop(meeting)

    def answers(
        self, key: MessageKey, brought: Sequence[Brought], fetches: Sequence[Fetch] | None
    ) -> list[tuple[MessageKey, Message]]:
        """Return the message to each rank; `fetches` bring numbers to its device."""
        position, action = key
        everyone = {n: value for each in brought for n, value in each.numbers.items()}
        numbers = [FetchedNumbers(brought, f) for f in fetches] if fetches else []
        return [
            ((position, Action(r, action.kind)), Message(numbers[r] if fetches else everyone, 0.0))
            for r in range(self.num_ranks)
        ]


class PostOffice:
    """The mailboxes of all ranks, for the messages of one stream. State: whether it is over."""

    def __init__(self, placement: Placement, devices: Sequence[DeviceRank | None]) -> None:
        self.placement, self.devices = placement, devices
        self.mailboxes = [Mailbox(device) for device in devices]
        self.meetings = Meetings(len(devices))
        self.is_closed = False

    def send(self, key: MessageKey, message: Message) -> None:
        """Raise `RankStopped` once it is closed: a rank that only sends must stop as well."""
        if self.is_closed:
            raise RankStopped
        target = self.placement[key[1].peer]
        own = self.devices[self.placement[key[1].stage]]
        if own is not None:
            message = message._replace(contents=own.send(message.contents, target))
        self.mailboxes[target].put(key, message)

    def expect(self, minibatch: int, receive: Action) -> None:
        """Do nothing: a mailbox takes what comes."""

    def meet(self, rank: int, key: MessageKey, numbers: Numbers) -> None:
        own = self.devices[rank]
        brought = Brought(rank, numbers, own.event() if own is not None else None)
        everyone = self.meetings.join(key, brought)
        if everyone is not None:
            fetches = [each.fetch for each in self.devices if each is not None]
            answers = self.meetings.answers(key, everyone, fetches)
            for mailbox, (own_key, message) in zip(self.mailboxes, answers, strict=True):
                mailbox.put(own_key, message)

    def close(self) -> None:
        self.is_closed = True
        for mailbox in self.mailboxes:
            mailbox.close()
