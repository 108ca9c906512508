"""The streams and the memory of simulated devices, and what each thread queues on them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stageline.errors import StreamOrderError
from stageline.runtime.accelerators.access_order import Access, Event, Memory, SimulatedStream
from stageline.runtime.accelerators.code_places import Place, calling_code


class ThreadState(threading.local):
    """What a thread does. State: its streams, innermost last, and its action."""

    def __init__(self) -> None:
        self.streams: list[tuple[object, SimulatedStream]] = []  # with the device of each
        self.action: Callable[[], object] | None = None  # of a rank that is inside a step
        self.is_watched = self.is_paused = False


class Queued(NamedTuple):
    """Something that was queued on a stream."""

    stream: SimulatedStream
    number: int
    place: Place


class Simulation:
    """Devices in one process. State: who used which memory, and what is current in each thread.

    Everything that a thread does outside of all streams is on the caller's.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = ThreadState()
        self.caller = SimulatedStream("the caller's stream")
        self.streams = [self.caller]
        self.memories: dict[int, Memory] = {}  # by id of torch's storage
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.on_host: set[int] = set()  # ids, of what Python made
        self.gone: deque[int] = deque()  # ids; a storage may end in any thread, at any time
        self.num_accesses = 0

    def new_stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(name)
        with self.lock:
            self.streams.append(stream)
        return stream

    @contextmanager
    def queueing_on(self, device: object, stream: SimulatedStream) -> Iterator[None]:
        self.thread.streams.append((device, stream))
        try:
            yield
        finally:
            self.thread.streams.pop()

    @property
    def device(self) -> object | None:
        """Return the device that this thread works on; the caller works on any."""
        return self.thread.streams[-1][0] if self.thread.streams else None

    def current(self, device: object = None) -> SimulatedStream:
        """Return this thread's stream on a device, or that of the innermost block."""
        for other, stream in reversed(self.thread.streams):
            if device is None or other is device:
                return stream
        return self.caller

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let this thread use memory without being seen."""
        self.thread.is_paused = True
        try:
            yield
        finally:
            self.thread.is_paused = False

    def record_event(self, device: object) -> Event:
        with self.lock:
            return self.current(device).event()

    def wait_event(self, device: object, event: Event) -> None:
        with self.lock:
            self.current(device).wait(event)

    def keep_alive(self, device: object, tensor: Tensor) -> None:
        with self.lock:
            memory = self.memory_of(tensor)
            if memory is not None:
                memory.kept_for.add(self.current(device))

    def run(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Queued:
        """Queue an operator on the current stream; raise if it uses memory that it must not."""
        streams = self.thread.streams
        device, stream = streams[-1] if streams else (None, self.caller)
        with self.lock:
            queued = self.queue(what, stream)
            self.use(reads, Access(*queued, "read"), device)
            if writes:
                self.use(writes, Access(*queued, "written"), device)
            return queued

    def run_in_channel(
        self,
        own: SimulatedStream,
        what: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
    ) -> Queued:
        """Queue an operation of a channel, which has a stream of its own; raise if on another."""
        queued = self.run(what, reads, writes)
        if queued.stream is not own:
            raise StreamOrderError(
                f"{queued.place} is queued on {queued.stream.name}, which would wait for the other "
                f"end of the channel: queue it on the stream of {own.name}"
            )
        return queued

    def queue(self, what: str, stream: SimulatedStream) -> Queued:
        """Queue something on a stream; it may be given memory that was released before."""
        with self.lock:
            if self.gone:
                self._release()
            action = self.thread.action
            place = Place(what, calling_code(), action() if action else None)
            return Queued(stream, stream.queue(place), place)

    def use(self, tensors: Iterable[Tensor], access: Access, device: object | None = None) -> None:
        """Use tensors, on a device or on all."""
        for tensor in tensors:
            memory = self.memory_of(tensor)
            if memory is not None:
                if memory.device is not device:
                    _check_device(memory, device, access.place)
                memory.use(access)
                self.num_accesses += 1

    def allocated(self, tensors: Iterable[Tensor], queued: Queued, device: object | None) -> None:
        """Record that what was queued has made tensors; those in known memory are views."""
        with self.lock:
            if self.gone:
                self._release()
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage is not None and id(storage) not in self.memories:
                    access = Access(*queued, "allocated")
                    uses = {queued.stream: access}
                    self._remember(storage, Memory(queued.stream, access, uses, device=device))

    def made_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Record that Python made tensors, in host memory."""
        with self.lock:
            self._release()
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage is not None and id(storage) not in self.memories:
                    self._remember(storage, Memory())
                    self.on_host.add(id(storage))

    def is_in_step(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether tensors are in memory of a device, and this thread's rank is in a step."""
        return self.thread.action is not None and not all(map(self.is_on_host, tensors))

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory; what no operator has used before is."""
        with self.lock:
            self.made_on_host([tensor])
            return id(storage_of(tensor)) in self.on_host

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of a tensor; None if it has none of its own."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        if self.gone:
            self._release()
        memory = self.memories.get(id(storage))
        return self._remember(storage, Memory()) if memory is None else memory

    def _remember(self, storage: torch.UntypedStorage, memory: Memory) -> Memory:
        number = id(storage)
        self.memories[number] = memory
        self.storages[number] = weakref.ref(storage, partial(_note, self.gone, number))
        return memory

    def _release(self) -> None:
        """Allow the owners of released memory to reuse it."""
        while self.gone:
            number = self.gone.popleft()
            memory = self.memories.pop(number)
            del self.storages[number]
            self.on_host.discard(number)
            if memory.owner is not None:
                memory.owner.released.append(memory)


def _note(gone: deque[int], number: int, _: object) -> None:
    gone.append(number)


def _check_device(memory: Memory, device: object | None, place: Place) -> None:
    if device is not None and memory.device is not None:
        raise StreamOrderError(
            f"memory of {memory.device} is used on {device} by {place}: copy it between the devices"
        )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for one without memory of its own, as a fake one."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return None if tensor.is_meta or not tensor.numel() else storage
