"""Find accesses to the same memory that no event orders, with vector clocks.

A stream counts what is queued on it, and knows how far it has waited for every other stream. Two
accesses are ordered if the stream of the later one has waited for the earlier one. Two that are
not, of which one writes, give results that depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stageline.errors import StreamOrderError
from stageline.runtime.accelerators.code_places import Place


class SimulatedStream:
    """A stream. State: how much is queued on it, and how much of all streams it comes after."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_queued = 0
        self.done_before: Event = {}
        self.released: list[Memory] = []  # that the next thing queued may reuse

    def queue(self, place: Place) -> int:
        """Queue something; return its number. It may be given memory that was released before."""
        self.num_queued += 1
        self.done_before[self] = self.num_queued
        while self.released:
            self.released.pop().check_reuse(place)
        return self.num_queued

    def event(self) -> Event:
        return dict(self.done_before)

    def wait(self, event: Event) -> None:
        for stream, number in event.items():
            self.done_before[stream] = max(number, self.done_before.get(stream, 0))

    def comes_after(self, access: Access) -> bool:
        return self.done_before.get(access.stream, 0) >= access.number


Event = dict[SimulatedStream, int]


class Access(NamedTuple):
    """A use of memory by something that was queued."""

    stream: SimulatedStream
    number: int
    place: Place
    verb: str = "read"  # or "written", or "allocated"

    @property
    def writes(self) -> bool:
        return self.verb != "read"

    def __str__(self) -> str:
        return f"{self.verb} on {self.stream.name} by {self.place}"


@dataclass(eq=False)
class Memory:
    """One block of memory. State: who used it last, and which streams it is kept alive for.

    Memory that was there before anything was observed has no owner, and is in no danger of reuse.
    """

    owner: SimulatedStream | None = None  # on which it was allocated
    last_write: Access | None = None
    last_uses: dict[SimulatedStream, Access] = field(default_factory=dict)
    kept_for: set[SimulatedStream] = field(default_factory=set)
    device: object | None = None  # of its owner; None if it may be on any

    def use(self, access: Access) -> None:
        """Raise unless the access comes after all that it must not overlap with."""
        earlier = [*self.last_uses.values()] if access.writes else []
        for other in [*earlier, self.last_write] if self.last_write else earlier:
            if not access.stream.comes_after(other):
                raise StreamOrderError(
                    f"memory is {access}\n  but nothing makes that wait until it was {other}:\n"
                    "  record an event behind the first, and wait for it before the second"
                )
        self.last_uses[access.stream] = access
        if access.writes:
            self.last_write = access

    def check_reuse(self, place: Place) -> None:
        """Raise if streams may still use the memory when its owner reuses it."""
        assert self.owner is not None
        for stream, access in self.last_uses.items():
            if stream not in self.kept_for and not self.owner.comes_after(access):
                raise StreamOrderError(
                    f"memory of {self.owner.name} was released and may be reused by {place}\n"
                    f"  but nothing makes that wait until it was {access}:\n"
                    "  keep it alive for that stream"
                )
