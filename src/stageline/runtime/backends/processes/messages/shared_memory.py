"""Shared memory for messages between processes of one machine: slots that are used again.

    sender      packs a message into a free slot, and announces it (local_links.py)
    receiver    has views of the slot, without a copy; when the last one is gone, the slot's first
                byte says that it is free again

The memory has no name in the file system: it ends with the processes that use it, however these
end.
"""

from __future__ import annotations

import os
import weakref
from ctypes import c_ubyte, memmove, string_at
from typing import Any

import torch
from torch import Tensor

from stageline.runtime.backends.processes.messages.packing import Packing
from stageline.runtime.exactness.strided_copy import ALIGNED

FREE, IN_USE = 0, 1  # values of a slot's first byte
START = ALIGNED  # where a slot's contents begin
PAGE = 4096
MINI_BATCHES_KEPT = 8  # a slot that was not needed in so many is given back


class SharedMemory:
    """Memory that is mapped here and in another process. State: what both write to it."""

    def __init__(self, file: int) -> None:
        """Map a whole file, which need not stay open: Python's own mmap would keep a copy open."""
        self.size = os.fstat(file).st_size
        self.storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, self.size)
        self.start = self.storage.data_ptr()
        self.state = c_ubyte.from_address(self.start)

    @property
    def is_free(self) -> bool:
        return self.state.value == FREE

    def exported(self) -> Any:
        """Return an object that tensors can be made of, and that is gone when they all are."""
        found: Any = (c_ubyte * self.size).from_address(self.start)
        found.memory = self  # which stays mapped for as long
        return found

    def read(self, length: int) -> bytes:
        """Return the first bytes of the contents."""
        return string_at(self.start + START, length)

    def write(self, data: bytes) -> None:
        """Write the first bytes of the contents."""
        memmove(self.start + START, data, len(data))


class Slot:
    """Memory for one message at a time, in the process that writes to it.

    State: the memory, and the mini-batch in which it was last used.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.file = os.memfd_create("stageline", os.MFD_CLOEXEC)  # until the receiver has it
        os.ftruncate(self.file, size)
        self.memory = SharedMemory(self.file)
        self.last_used = 0

    def take_file(self) -> int | None:
        """Return the file that the receiver maps, but only once; the caller closes it."""
        file, self.file = self.file, -1
        return file if file >= 0 else None


class SlotPool:
    """The slots in which this process writes messages to another one. State: all of them.

    There are as many as messages were on their way or in use at a time.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[Slot]] = {}  # by size
        self.in_use: dict[int, list[Slot]] = {}  # when they were last looked at
        self.num_made = 0
        self.minibatch = 0

    def take(self, num_bytes: int) -> Slot:
        """Return a slot for contents of so many bytes, which is in use from now on."""
        size = slot_size(START + num_bytes)
        free, in_use = self.free.setdefault(size, []), self.in_use.setdefault(size, [])
        if not free:
            free += [slot for slot in in_use if slot.memory.is_free]
            in_use[:] = [slot for slot in in_use if not slot.memory.is_free]
        slot = free.pop() if free else self._made(size)
        slot.last_used = self.minibatch
        slot.memory.state.value = IN_USE
        in_use.append(slot)
        return slot

    def begin_minibatch(self) -> list[Slot]:
        """Return the slots that were not needed lately, and use them no more."""
        self.minibatch += 1
        oldest = self.minibatch - MINI_BATCHES_KEPT
        dropped = []
        for slots in (*self.free.values(), *self.in_use.values()):
            for slot in [s for s in slots if s.last_used < oldest and s.memory.is_free]:
                slots.remove(slot)
                dropped.append(slot)
        return dropped

    def _made(self, size: int) -> Slot:
        self.num_made += 1
        return Slot(self.num_made, size)


class ReceivedSlots:
    """The slots in which another process writes to this one. State: those that are mapped."""

    def __init__(self) -> None:
        self.memories: dict[int, SharedMemory] = {}  # by number
        self.lent: dict[int, weakref.ref[Any]] = {}  # what the tensors of a message are made of

    def add(self, number: int, file: int) -> None:
        """Map a new slot, and close its file."""
        try:
            self.memories[number] = SharedMemory(file)
        finally:
            os.close(file)

    def drop(self, number: int) -> None:
        """Forget a slot that is free."""
        del self.memories[number]

    def read(self, number: int, length: int) -> bytes:
        """Return the first bytes of a slot's contents."""
        return self.memories[number].read(length)

    def lend(self, number: int, packing: Packing, start: int) -> Tensor:
        """Return a message's buffer in a slot, which is free when nothing refers to the buffer."""
        memory, lent = self.memories[number], self.lent
        exported = memory.exported()

        def give_back(_: object) -> None:
            del lent[number]  # first: once the slot is free, its next message may come at once
            memory.state.value = FREE

        lent[number] = weakref.ref(exported, give_back)
        return buffer_in(exported, packing, start)


def buffer_in(exported: Any, packing: Packing, start: int) -> Tensor:
    """Return the buffer of a message, which begins at a byte of a slot's contents."""
    return torch.frombuffer(
        exported, dtype=packing.dtype, count=packing.length, offset=START + start
    )


def slot_size(num_bytes: int) -> int:
    """Return the size of a slot for so many bytes: whole pages, and at most an eighth more.

    >>> slot_size(100), slot_size(262_208), slot_size(1_000_000)
    (4096, 294912, 1048576)
    """
    step = max(PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step
