"""A simulated device on the CPU, which raises where two uses of memory are in no certain order.

Operators run at once, in the order in which threads call them: one of the orders that the streams
allow. What is checked is that all other orders give the same: each operator's reads and writes are
recorded on the simulated stream that is current in its thread, and two uses of the same memory on
different streams have to be ordered by events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

import torch
from torch import Tensor

from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.access_order import Access, Event, SimulatedStream
from stageline.runtime.accelerators.host_waits import HostCopies
from stageline.runtime.accelerators.simulation import Simulation
from stageline.runtime.accelerators.watched_operators import WatchedOperators
from stageline.runtime.exactness.strided_copy import exact_copy


class CheckedAccelerator:
    """One simulated device; those of one process share the simulation."""

    def __init__(self, name: str, simulation: Simulation) -> None:
        self.device, self.name, self.simulation = torch.device("cpu"), name, simulation

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def rank_thread(self, action: Callable[[], object] | None = None) -> Iterator[None]:
        thread = self.simulation.thread
        before = thread.action, thread.is_watched
        watch = nullcontext() if thread.is_watched else WatchedOperators(self.simulation)
        thread.action, thread.is_watched = action, True
        try:
            with watch, HostCopies() if action else nullcontext():
                yield
        finally:
            thread.action, thread.is_watched = before

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
        """Assume that memory which was allocated before the check began is host memory."""
        return self.upload(tensor) if self.simulation.is_on_host(tensor) else tensor

    def upload(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor, "a copy from the host", self.simulation.current(self))

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to memory that torch keeps until copies from and to it are done."""
        with self.simulation.paused():
            copy = exact_copy(tensor)
        self.simulation.made_on_host([copy])
        self._copy(tensor, copy, "a copy to the host", self.simulation.current(self))
        return copy

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
        with simulation.lock:
            simulation.allocated([copy], simulation.queue(what, own), self)
            stream.wait(own.event())
            self._copy(tensor, copy, what, stream)
            own.wait(stream.event())
        return copy

    def _copy(self, tensor: Tensor, copy: Tensor, what: str, stream: SimulatedStream) -> None:
        simulation = self.simulation
        with simulation.lock:
            queued = simulation.queue(what, stream)
            simulation.use([tensor], Access(*queued, "read"))
            simulation.use([copy], Access(*queued, "written"))
