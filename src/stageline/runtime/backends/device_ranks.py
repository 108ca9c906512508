"""The streams of ranks that are threads on devices, and the copies between these devices.

    rank 0   compute │ F0 ─ event ─┐                                  nothing waits on the host
             copies  │             └► copy ┐
    rank 1   copies  │                copy ┴─ event ─┐
             compute │  …                            └► F0            where its message is needed

A directed pair of ranks has a stream on each of its two devices, because a copy between devices is
queued on both. On one device nothing is copied: the receiver waits for the sender's event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from stageline.model import trees
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.carry import carried, on_tensors

Accelerators = Sequence[Accelerator | None]


class Parcel(NamedTuple):
    """Values for another rank, and the event that marks them as ready."""

    values: Any
    arrived: Any  # None if they are in host memory


class DeviceLink:
    """Copies from one device to another, on a stream of each. Used by one thread."""

    def __init__(self, source: Accelerator, target: Accelerator, name: str) -> None:
        self.source, self.target = source, target
        self.out_stream, self.in_stream = source.new_stream(name), target.new_stream(name)

    def copy(self, values: Any, made: Any) -> Parcel:
        """Queue copies of values after the event that marks them as ready."""
        source, target = self.source, self.target
        with target.queueing_on(self.in_stream), source.queueing_on(self.out_stream):
            source.wait_event(made)
            copies = on_tensors(self._copy, values)
            return Parcel(copies, target.record_event())

    def _copy(self, tensor: Tensor) -> Tensor:
        self.source.keep_alive(tensor)
        return self.target.copy_from(tensor, self.source)


class DeviceRank:
    """A rank on a device. State: its streams. Only the rank's own thread uses it."""

    def __init__(self, rank: int, accelerators: Accelerators) -> None:
        self.rank, self.accelerators = rank, accelerators
        self.links: dict[tuple[int, int], DeviceLink] = {}
        self.own = accelerators[rank]
        self.compute = self.own.new_stream(f"compute of rank {rank}") if self.own else None

    @contextmanager
    def working(self, action: Callable[[], object]) -> Iterator[None]:
        """Let the calling thread be the rank's."""
        if self.own is None:
            yield
            return
        with self.own.rank_thread(action), self.own.queueing_on(self.compute):
            yield

    def send(self, values: Any, target: int) -> Parcel:
        """Queue the copies that transfer values to another rank."""
        there = self.accelerators[target]
        if self.own is None:
            return Parcel(values, None)
        if there is None:  # a rank on the CPU, where nothing is queued: the host has to wait
            return Parcel(carried(values, self.own, None), None)
        if there is self.own:
            return Parcel(values, self.event())
        return self._link(self.rank, target).copy(values, self.event())

    def take(self, parcel: Parcel) -> Any:
        """Return values that were sent to this rank, from now on usable on its stream."""
        own = self.own
        if own is None:
            return parcel.values
        if parcel.arrived is None:
            return carried(parcel.values, None, own)
        own.wait_event(parcel.arrived)
        for tensor in trees.tensors(parcel.values):
            own.keep_alive(tensor)
        return parcel.values

    def event(self) -> Any:
        """Return an event behind all that the rank has queued so far."""
        return self.own.record_event() if self.own is not None else None

    def fetch(self, values: Any, source: int, made: Any) -> Any:
        """Return another rank's values, which are ready after its event `made`."""
        there = self.accelerators[source]
        if source == self.rank:
            return values
        if there is None or self.own is None or there is self.own:
            return self.take(Parcel(values, made))
        return self.take(self._link(source, self.rank).copy(values, made))

    def _link(self, source: int, target: int) -> DeviceLink:
        ends = source, target
        if ends not in self.links:
            here, there = self.accelerators[source], self.accelerators[target]
            assert here is not None
            assert there is not None
            name = f"copies from rank {source} to rank {target}"
            self.links[ends] = DeviceLink(here, there, name)
        return self.links[ends]


def device_ranks(accelerators: Accelerators) -> tuple[DeviceRank | None, ...]:
    """Return the streams of all ranks; None for each if all of them are on the CPU."""
    if not any(accelerators):
        return (None,) * len(accelerators)
    return tuple(DeviceRank(rank, accelerators) for rank in range(len(accelerators)))
