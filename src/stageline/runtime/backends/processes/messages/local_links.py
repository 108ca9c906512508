"""Messages between processes of one machine: tensors in shared memory, announced over a socket.

    rank 0 ══ socket, both ways ══ rank 1        an announcement: which message, in which slot

Gloo has a thread of its own in each process, and sends two messages for one of ours: on two cores,
with layers that do nothing, an action took 290 µs over gloo.

A rank reads announcements when it waits for a message, and when it cannot send because the other
end has not read for long. So ranks never wait for each other to read.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from array import array
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import NamedTuple

from stageline.runtime.backends.processes.messages.encoding import decode
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.message_parts import (
    RankLost,
    parts_of_message,
    unpacked_message,
)
from stageline.runtime.backends.processes.messages.packing import padded
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.backends.processes.messages.shared_memory import (
    ReceivedSlots,
    SlotPool,
    buffer_in,
)
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.schedules.action import Action, Kind

# mini-batch, stage, kind, micro-batch, peer, version; slot, bytes of a description of the contents
ANNOUNCEMENT = struct.Struct("qiiiiiIQ")
DROPPED = -1  # in the place of a mini-batch: the slot is not used any more
KINDS = tuple(Kind)
NUMBER_OF_KIND = {kind: number for number, kind in enumerate(KINDS)}
FILE_DESCRIPTOR = struct.Struct("i")
ONE_FILE = socket.CMSG_SPACE(FILE_DESCRIPTOR.size)
QUEUED = 2**20  # bytes of announcements that nobody has read, if the system permits: some 1,300
CLOSED = "Connection closed by peer"


class Announced(NamedTuple):
    """Where a message that has come is."""

    slot: int
    described: int  # bytes that describe its contents; 0 if both ends know them


class LocalLink:
    """Messages to and from one rank on this machine.

    State: the slots of both directions, and messages that came before they were asked for.
    """

    def __init__(self, rank: int, end: socket.socket, limit: float, links: list[LocalLink]) -> None:
        """Take over a connected socket; `links` are all links of this process."""
        self.rank, self.socket, self.limit, self.links = rank, end, limit, links
        self.slots, self.received = SlotPool(), ReceivedSlots()
        self.early: dict[MessageKey, deque[Announced]] = {}
        # a timeout of Python's own would take one more system call for each receive
        seconds = struct.pack("ll", int(limit), int(limit % 1 * 1e6))
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUED)
        self.close = weakref.finalize(self, end.close)

    def send(self, key: MessageKey, layout: MessageLayout, message: Message) -> None:
        """Copy a message into a slot and announce it."""
        layout, tensors, aliased, description = parts_of_message(layout, message)
        packing, lead = layout.packing, padded(len(description))
        slot = self.slots.take(lead + packing.num_bytes)
        if description:
            slot.memory.write(description)
        packing.pack(tensors, aliased, buffer_in(slot.memory.exported(), packing, lead))
        position, (stage, kind, microbatch, peer, version) = key
        action = stage, NUMBER_OF_KIND[kind], microbatch, peer, version
        packet = ANNOUNCEMENT.pack(position, *action, slot.number, len(description))
        self._announce(packet, slot.take_file())

    def take(self, key: MessageKey, layout: MessageLayout) -> Message:
        """Wait for a message; raise `RankLost` if it does not come."""
        if waiting := self.early.get(key):
            found = waiting.popleft()
            if not waiting:
                del self.early[key]
        else:
            found_key, found = self._receive()
            while found_key != key:
                self._keep(found_key, found)
                found_key, found = self._receive()
        if found.described:
            described = decode(self.received.read(found.slot, found.described))
            layout = replace(layout, shapes=tuple(map(ValueSpec.from_description, described)))
        buffer = self.received.lend(found.slot, layout.packing, padded(found.described))
        return unpacked_message(layout, buffer)

    def begin_minibatch(self) -> None:
        """Give slots back that have not been needed for some mini-batches."""
        for slot in self.slots.begin_minibatch():
            self._announce(ANNOUNCEMENT.pack(DROPPED, 0, 0, 0, 0, 0, slot.number, 0), None)

    def hang_up(self) -> None:
        """End the waits at both ends."""
        with suppress(OSError):  # it was closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def read_ahead(self) -> None:
        """Read an announcement that has come, for later."""
        if found := self._read():
            self._keep(*found)

    def _keep(self, key: MessageKey, found: Announced) -> None:
        # a rank that is a step ahead sends messages of the same names again
        self.early.setdefault(key, deque()).append(found)

    def _announce(self, packet: bytes, file: int | None) -> None:
        files = [] if file is None else [_passed(file)]
        try:
            while True:
                try:
                    self.socket.sendmsg([packet], files, socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:
                    self._make_room()
        except OSError:
            raise RankLost(self.rank, CLOSED) from None
        finally:
            if file is not None:
                os.close(file)

    def _make_room(self) -> None:
        """Wait until the other end has read, and read all that comes meanwhile."""
        by_file = {link.socket.fileno(): link for link in self.links}
        own = self.socket.fileno()
        poll = select.poll()
        for file in by_file:
            poll.register(file, select.POLLIN | (select.POLLOUT if file == own else 0))
        end, is_full = monotonic() + self.limit, True
        while is_full:
            found = dict(poll.poll(1e3 * max(0.0, end - monotonic())))
            if not found:
                raise RankLost(self.rank, "it has read no messages")
            for file in (file for file, events in found.items() if events & select.POLLIN):
                by_file[file].read_ahead()
            is_full = not found.get(own, 0) & ~select.POLLIN

    def _receive(self) -> tuple[MessageKey, Announced]:
        """Wait for the next message."""
        while (found := self._read()) is None:
            pass
        return found

    def _read(self) -> tuple[MessageKey, Announced] | None:
        """Read one announcement; return None if it is not of a message."""
        packet, file = self._next_packet()
        position, stage, kind, *others, slot, described = ANNOUNCEMENT.unpack(packet)
        if position == DROPPED:
            self.received.drop(slot)
            return None
        if file is not None:
            self.received.add(slot, file)
        return (position, Action(stage, KINDS[kind], *others)), Announced(slot, described)

    def _next_packet(self) -> tuple[bytes, int | None]:
        """Return a packet, and the file that came with it."""
        try:
            packet, ancillary, *_ = self.socket.recvmsg(ANNOUNCEMENT.size, ONE_FILE)
        except BlockingIOError:
            raise RankLost(self.rank, "the time is over") from None
        except OSError:
            raise RankLost(self.rank, CLOSED) from None
        if not packet:
            raise RankLost(self.rank, CLOSED)
        return packet, FILE_DESCRIPTOR.unpack(ancillary[0][2])[0] if ancillary else None


def open_links(sockets: Mapping[int, socket.socket], limit: float) -> dict[int, LocalLink]:
    """Return a link for each rank that a socket is connected to."""
    links: list[LocalLink] = []
    links += (LocalLink(rank, end, limit, links) for rank, end in sockets.items())
    return {link.rank: link for link in links}


def _passed(file: int) -> tuple[int, int, array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file])
