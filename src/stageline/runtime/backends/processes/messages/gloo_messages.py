"""Messages over a process group: receives that are posted, and sends that leave.

rank thread      expect ─► irecv posted        send ─► packed, isend
                 takes it when it is needed         a thread waits for sends to leave
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from stageline.runtime.backends.processes.exchange import bytes_to_tensor
from stageline.runtime.backends.processes.groups import ProcessGroups
from stageline.runtime.backends.processes.messages.encoding import LENGTH, decode
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.message_parts import (
    RankLost,
    parts_of_message,
    unpacked_message,
)
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message, MessageKey

UNKNOWN = 0  # tag of messages whose form only the sender knows


class Receive(NamedTuple):
    """A message that was promised. If its form is known, a receive is posted for it."""

    peer: int
    layout: MessageLayout
    buffer: Tensor | None
    work: Any


class Incoming:
    """Messages to this rank. State: those that were promised, and those that came out of turn."""

    def __init__(self, groups: ProcessGroups, limit: float) -> None:
        self.groups, self.limit = groups, timedelta(seconds=limit)
        self.promised: dict[MessageKey, Receive] = {}
        self.unknown: dict[int, deque[MessageKey]] = {}  # by rank, in the order in which they come
        self.early: dict[MessageKey, Message] = {}

    def expect(self, send: MessageKey, peer: int, layout: MessageLayout) -> None:
        buffer = work = None
        if layout.shapes is None:
            self.unknown.setdefault(peer, deque()).append(send)
        else:
            buffer = layout.packing.empty()
            work = self._posted(buffer, peer, layout.packing.tag)
        self.promised[send] = Receive(peer, layout, buffer, work)

    def take(self, send: MessageKey) -> Message:
        """Wait for a message; raises `RankLost` if it does not come."""
        while send not in self.early:
            receive = self.promised[send]
            if receive.buffer is None:
                self._take_unknown(receive.peer)
            else:
                del self.promised[send]
                self._wait(receive.work, receive.peer)
                return unpacked_message(receive.layout, receive.buffer)
        return self.early.pop(send)

    def _take_unknown(self, peer: int) -> None:
        """Receive the next message: its description first, then its tensors."""
        send = self.unknown[peer].popleft()
        layout = self.promised.pop(send).layout
        shapes = tuple(map(ValueSpec.from_description, decode(self.receive_bytes(peer))))
        layout = replace(layout, shapes=shapes)
        buffer = layout.packing.empty()
        self._receive(buffer, peer)
        self.early[send] = unpacked_message(layout, buffer)

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for bytes that a rank sends, the first of those that were not received yet."""
        length = bytearray(LENGTH)
        self._receive(bytes_to_tensor(length), peer)
        data = bytearray(int.from_bytes(length, "little"))
        self._receive(bytes_to_tensor(data), peer)
        return bytes(data)

    def _receive(self, buffer: Tensor, peer: int) -> None:
        self._wait(self._posted(buffer, peer, UNKNOWN), peer)

    def _posted(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return self.groups.pipeline.recv([buffer], peer, tag)
        except RuntimeError as error:
            raise RankLost(peer, str(error)) from None

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(self.limit)
        except RuntimeError as error:  # the connection broke, or the time is over
            raise RankLost(peer, str(error)) from None


class Outgoing:
    """Messages on their way out. State: those that have not left yet.

    A thread of their own holds them until they have. It is woken for many small ones at once, and
    when the rank is about to wait: a thread that wakes takes time from the rank.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.fresh: list[tuple[Any, Tensor]] = []  # the thread has not been told of them
        self.num_bytes = 0  # of these
        self.leaving: SimpleQueue[list[tuple[Any, Tensor]] | None] = SimpleQueue()
        self.thread = Thread(target=self._wait, name="stageline-sends", daemon=True)
        self.thread.start()

    def send(self, peer: int, layout: MessageLayout, message: Message) -> None:
        layout, tensors, aliased, description = parts_of_message(layout, message)
        tag = layout.packing.tag
        if description:
            tag = UNKNOWN
            self.send_bytes(peer, description)
        self._post(peer, layout.packing.pack(tensors, aliased), tag)

    def send_bytes(self, peer: int, data: bytes) -> None:
        for part in (len(data).to_bytes(LENGTH, "little"), data):
            self._post(peer, bytes_to_tensor(bytearray(part)), UNKNOWN)

    def flush(self, beyond: int = 0) -> None:
        """Hand new messages to the thread, if they take more than so many bytes."""
        if self.num_bytes > beyond:
            self.leaving.put(self.fresh)
            self.fresh, self.num_bytes = [], 0

    def close(self) -> None:
        self.flush()
        self.leaving.put(None)
        self.thread.join()

    def _post(self, peer: int, buffer: Tensor, tag: int) -> None:
        try:
            self.fresh.append((self.groups.pipeline.send([buffer], peer, tag), buffer))
        except RuntimeError as error:
            raise RankLost(peer, str(error)) from None
        self.num_bytes += buffer.nbytes

    def _wait(self) -> None:
        while (items := self.leaving.get()) is not None:
            while items:
                with suppress(RuntimeError):  # the rank learns of it when it sends or receives
                    items[0][0].wait()
                del items[0]
