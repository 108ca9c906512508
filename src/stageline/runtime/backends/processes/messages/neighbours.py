"""Connect the ranks of a pipeline that are on the same machine, by a socket for each pair.

A process that connects shows the token of the one that listens, which it has from the process
group, and must belong to the same user.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_bytes
from typing import NamedTuple

import torch.distributed as dist

from stageline.runtime.backends.processes import exchange

HELLO = struct.Struct("i16s")  # the rank that connects, and the token of the one that listens
CREDENTIALS = struct.Struct("3i")  # process, user, group
CONNECT = 30.0  # seconds; all ranks are there when this begins


class Address(NamedTuple):
    """Where a process listens: a name that is valid on its machine. Empty if it does not."""

    machine: str = ""
    name: bytes = b""
    token: bytes = b""


def connect_neighbours(
    pipeline: Sequence[int], everyone: dist.ProcessGroup, *, shares_memory: bool
) -> dict[int, socket.socket]:
    """Return a connected socket for each other rank of the pipeline on this machine.

    `pipeline` has the global rank of each of its ranks. All processes call this, also those that
    do not share memory; they have no neighbours.
    """
    with ExitStack() as stack:
        machine = _machine() if shares_memory else ""
        listener = stack.enter_context(_listening()) if machine else None
        own = Address(machine, listener.getsockname(), token_bytes(16)) if listener else Address()
        found = exchange.gather(own._asdict(), everyone)
        addresses = [Address(**found[dist.get_group_rank(everyone, rank)]) for rank in pipeline]
        if listener is None:
            return {}
        rank = pipeline.index(dist.get_rank())
        near = {other for other, each in enumerate(addresses) if each.machine == machine}
        sockets = {other: _call(rank, addresses[other]) for other in near if other < rank}
        while missing := near - {rank, *sockets}:
            sockets |= _accept(listener, own.token, missing)
    return sockets


def _listening() -> socket.socket:
    """Return a socket with a name that the system chooses, which ends with the socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(CONNECT)
    listener.bind("")
    listener.listen(socket.SOMAXCONN)
    return listener


def _machine() -> str:
    """Return what only processes that can reach each other's sockets have in common."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()} {socket.gethostname()}"
    return ""  # not Linux: others lack memory without a name


def _call(rank: int, address: Address) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(CONNECT)
    end.connect(address.name)
    end.send(HELLO.pack(rank, address.token))
    return end


def _accept(listener: socket.socket, token: bytes, missing: set[int]) -> dict[int, socket.socket]:
    """Return the next one that connects, if it is one of those that are missing."""
    end, _ = listener.accept()
    end.settimeout(CONNECT)
    hello = end.recv(HELLO.size)
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if len(hello) == HELLO.size and CREDENTIALS.unpack(credentials)[1] == os.getuid():
        rank, shown = HELLO.unpack(hello)
        if shown == token and rank in missing:
            return {rank: end}
    end.close()
    return {}
