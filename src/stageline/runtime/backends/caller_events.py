"""Events between the caller's streams and those of the ranks, where a mini-batch begins and ends.

The host never waits for a device. A rank begins behind what the caller has queued so far: new
weights, the batch. What the caller queues next comes behind what ranks have queued: gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from stageline.runtime.accelerators.accelerator import Accelerator

Events = dict[Accelerator, Any]


class CallerEvents:
    """State: by segment, the caller's events that ranks wait for, and theirs for the caller."""

    def __init__(self, accelerators: Sequence[Accelerator | None]) -> None:
        self.of_ranks = accelerators
        self.accelerators = tuple(dict.fromkeys(each for each in accelerators if each))
        self.begun: dict[int, list[Any]] = {}
        self.ended: dict[int, dict[int, Any]] = {}  # by segment and rank

    def feed(self, segment: int) -> None:
        """Record the caller's events of a mini-batch, in the caller's thread."""
        self.begun[segment] = [each.record_event() for each in self.accelerators]

    def begin(self, rank: int, segment: int) -> None:
        """Let a rank's stream wait for the caller's, on all devices: a batch may be on any."""
        own = self.of_ranks[rank]
        if own is not None:
            for event in self.begun.get(segment, ()):
                own.wait_event(event)

    def end(self, rank: int, segment: int) -> None:
        """Record the event of a rank that has queued all of a segment."""
        own = self.of_ranks[rank]
        if own is not None:
            self.ended.setdefault(segment, {})[rank] = own.record_event()

    def wait(self, segment: int) -> None:
        """Let the caller's streams wait for all ranks, up to the end of a segment.

        Nobody may still need the caller's events before it.
        """
        latest: dict[int, Any] = {}
        for number in sorted(each for each in self.ended if each <= segment):
            latest |= self.ended.pop(number)
        for rank, event in latest.items():
            own = self.of_ranks[rank]
            assert own is not None
            own.wait_event(event)
        for number in [each for each in self.begun if each <= segment]:
            del self.begun[number]


def hand_over(own: Accelerator | None, made: Iterable[Any]) -> None:
    """Hand a rank's tensors to the caller: their memory is not reused while ranks continue."""
    for tensor in made:
        if own is not None and isinstance(tensor, Tensor):
            own.keep_alive(tensor)
