"""The streams and the memory of simulated devices, and what each thread queues on them."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from stageline.runtime.accelerators.access_order import Access, Event, Memory, SimulatedStream

PACKAGE = str(Path(__file__).parents[2])
OWN = str(Path(__file__).parent)
OF_OTHERS = (OWN, str(Path(torch.__file__).parent), "<")  # code that a place does not name


class ThreadState(threading.local):
    """What a thread does. State: its streams, innermost last, and its action."""

    def __init__(self) -> None:
        self.streams: list[tuple[object, SimulatedStream]] = []  # with the device of each
        self.action: Callable[[], object] | None = None
        self.is_paused = False


class Simulation:
    """Devices in one process. State: who used which memory, and what is current in each thread.

    Everything that a thread does outside of all streams is on the caller's.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = ThreadState()
        self.caller = SimulatedStream("the caller's stream")
        self.streams = [self.caller]
        self.memories: dict[int, Memory] = {}  # by the id of torch's storage
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.gone: deque[int] = deque()  # ids; storages may end in any thread, at any time
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

    def queue(
        self,
        what: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        stream: SimulatedStream | None = None,
    ) -> None:
        """Queue something that uses tensors; raise if it may overlap with other uses."""
        stream = stream or self.current()
        with self.lock:
            self._release()
            place, number = self._place(what), stream.queue()
            for tensors, verb in ((reads, "read"), (writes, "written")):
                for tensor in tensors:
                    memory = self.memory_of(tensor)
                    if memory is not None:
                        self.num_accesses += 1
                        memory.use(Access(stream, number, place, verb))

    def allocated(
        self, what: str, tensors: Iterable[Tensor], stream: SimulatedStream | None = None
    ) -> None:
        """Record that what was queued last has made tensors; those in known memory are views."""
        stream = stream or self.current()
        with self.lock:
            self._release()
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage is not None and id(storage) not in self.memories:
                    access = Access(stream, stream.num_queued, self._place(what), "allocated")
                    self._remember(storage, Memory(stream, access, {stream: access}))

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory was allocated or used under watch."""
        with self.lock:
            self._release()
            return id(storage_of(tensor)) in self.memories

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of a tensor; None if it has none of its own."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        self._release()
        memory = self.memories.get(id(storage))
        return self._remember(storage, Memory()) if memory is None else memory

    def _remember(self, storage: torch.UntypedStorage, memory: Memory) -> Memory:
        number = id(storage)
        self.memories[number] = memory
        self.storages[number] = weakref.ref(storage, partial(_note, self.gone, number))
        return memory

    def _release(self) -> None:
        """Let the owners of released memory reuse it from now on."""
        while self.gone:
            number = self.gone.popleft()
            memory = self.memories.pop(number)
            del self.storages[number]
            if memory.owner is not None:
                memory.owner.released.append(memory)

    def _place(self, what: str) -> str:
        action = self.thread.action() if self.thread.action else None
        during = f" during {action}" if action else ""
        return f"{what}{_line(inspect.currentframe())}{during}"


def _note(gone: deque[int], number: int, _: object) -> None:
    gone.append(number)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for one without memory of its own, as a fake one."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage if storage.nbytes() else None


def _line(frame: FrameType | None) -> str:
    """Return the innermost line of code that is neither torch's nor of the simulation."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(OF_OTHERS):
            return f" at {path.removeprefix(PACKAGE + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
