"""A simulated device on the CPU, which raises where two uses of memory are in no certain order.

Operators run at once, in the order in which threads call them: one of the orders that the streams
allow. What is checked is that all other orders give the same: each operator's reads and writes are
recorded on the simulated stream that is current in its thread, and two uses of the same memory on
different streams have to be ordered by events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

import torch
from torch import Tensor

from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.access_order import Event, SimulatedStream
from stageline.runtime.accelerators.simulation import Simulation
from stageline.runtime.accelerators.watched_operators import WatchedOperators
from stageline.runtime.exactness.strided_copy import exact_copy


class CheckedAccelerator:
    """One simulated device; those of one process share the simulation."""

    def __init__(self, device: torch.device, simulation: Simulation) -> None:
        self.device, self.simulation = device, simulation

    @contextmanager
    def rank_thread(self, action: Callable[[], object] | None = None) -> Iterator[None]:
        thread = self.simulation.thread
        before, thread.action = thread.action, action
        try:
            with WatchedOperators(self.simulation):
                yield
        finally:
            thread.action = before

    def new_stream(self, purpose: str) -> SimulatedStream:
        return self.simulation.new_stream(purpose)

    def queueing_on(self, stream: SimulatedStream) -> AbstractContextManager[object]:
        return self.simulation.queueing_on(self, stream)

    def record_event(self) -> Event:
        return self.simulation.record_event(self)

    def wait_event(self, event: Event) -> None:
        self.simulation.wait_event(self, event)

    def keep_alive(self, tensor: Tensor) -> None:
        self.simulation.keep_alive(self, tensor)

    def copy_from(self, tensor: Tensor, source: Accelerator) -> Tensor:
        """Copy as torch does: on the source's stream; both streams wait for each other."""
        if source is self:
            return tensor
        return self._copied(tensor, "a copy between devices", self.simulation.current(source))

    def bring(self, tensor: Tensor) -> Tensor:
        """Take memory that was there before anything was watched for host memory."""
        return tensor if self.simulation.is_known(tensor) else self.upload(tensor)

    def upload(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor, "a copy from the host", self.simulation.current(self))

    def download(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor, "a copy to the host", self.simulation.current(self))

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.keep_alive(tensor)

    def record_time(self) -> float:
        """Return the host's time: operators run at once."""
        return perf_counter()

    def seconds_between(self, earlier: float, later: float) -> float:
        return later - earlier

    def synchronize(self) -> None:
        """Do nothing: operators have run."""

    def _copied(self, tensor: Tensor, what: str, stream: SimulatedStream) -> Tensor:
        """Return a copy in memory of the current stream, made by a stream that it waits for."""
        simulation, own = self.simulation, self.simulation.current(self)
        with simulation.paused():
            copy = exact_copy(tensor)
        simulation.queue(what, [], [], own)
        simulation.allocated(what, [copy], own)
        stream.wait(own.event())
        simulation.queue(what, [tensor], [copy], stream)
        own.wait(stream.event())
        return copy
