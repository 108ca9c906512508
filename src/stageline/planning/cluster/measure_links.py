"""sl.measure_links: measure the links between the processes of a group, one pair at a time.

    rank 0 ◄─► rank 1 ◄─► rank 2 ◄─► rank 3
    └── machine a ──┘     └── machine b ──┘       the link in the middle is the network

Each rank exchanges messages with the next. Most messages of a pipeline take these links, and their
number grows linearly with the ranks, where that of all pairs grows with the square. The round trip
of a small message is twice the latency; a large one takes its bytes over the bandwidth on top.
Messages go where those of a pipeline go: through shared memory within a machine, else over gloo.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from itertools import groupby, pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.costs import Link
from stageline.errors import PlanError, StageError
from stageline.model.layers import Value
from stageline.planning.cluster.cluster import ByteSize, Cluster, Device, Level
from stageline.planning.console import progress_bar
from stageline.runtime.accelerators.measured_devices import device_memory
from stageline.runtime.backends.processes.exchange import gather
from stageline.runtime.backends.processes.groups import OwnedGroup
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.local_links import LocalLink, open_links
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.runtime.backends.processes.messages.neighbours import connect_neighbours
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message
from stageline.schedules.action import Action, Kind
from stageline.units import format_bytes

SMALL, LARGE = 64, 2**23  # bytes of a message
SMALL_PER_LARGE = 10  # small messages for each large one
# The first rounds do not count: buffers are newly allocated, connections newly made.
WARM_UP_ROUNDS, ROUNDS = 2, 7
TIMEOUT = timedelta(minutes=1)  # to wait for another rank
ANY_KEY, ANY_VALUE = (0, Action(0, Kind.SEND_F, 0, peer=1)), Value(0, "x")


class MessageSeconds(NamedTuple):
    """The one-way time of a small and of a large message."""

    small: float
    large: float


class Probe(NamedTuple):
    """A message that is sent to measure a link."""

    tensor: Tensor
    layout: MessageLayout

    @staticmethod
    def of(num_bytes: int) -> Probe:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        return Probe(tensor, MessageLayout(True, (ANY_VALUE,), (ValueSpec.of(tensor),)))


class Channels(NamedTuple):
    """The ways to other ranks: links within the machine, and a group for all others."""

    links: Mapping[int, LocalLink]
    group: dist.ProcessGroup

    def send(self, probe: Probe, peer: int) -> None:
        if link := self.links.get(peer):
            link.send(ANY_KEY, probe.layout, Message({ANY_VALUE: probe.tensor}, 0.0))
        else:
            dist.send(probe.tensor, peer, self.group)

    def receive(self, probe: Probe, peer: int) -> None:
        if link := self.links.get(peer):
            link.take(ANY_KEY, probe.layout)
        else:
            dist.recv(probe.tensor, peer, self.group)


class RankMeasurement(NamedTuple):
    """The memory of a rank, and the message times to the next rank, if there is one."""

    memory: float
    to_next: MessageSeconds | None


def measure_links(*, memory: ByteSize | None = None, progress: bool = True) -> Cluster:
    """Measure the links between all ranks and return them as a cluster, the same on every rank.

    All ranks have to call it. The cluster has a level for the ranks of one machine, which share a
    host name, and one for the machines; each level has the median of its links. `memory` is that of
    one device. By default it is the GPU's memory, or the machine's divided by its number of ranks,
    and the smallest over all ranks.
    """
    _check(memory)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    try:
        with closing(OwnedGroup(dist.new_group(backend="gloo", timeout=TIMEOUT))) as own:
            ranks_per_machine = count_ranks_per_machine(gather(socket.gethostname(), own.now))
            total = (WARM_UP_ROUNDS + ROUNDS) * (num_ranks - 1)
            near = connect_neighbours(range(num_ranks), own.now, shares_memory=True)
            links = open_links(near, TIMEOUT.total_seconds())
            with progress_bar(total, "exchanges", enabled=progress and rank == 0) as begin:
                to_next = _measure(rank, num_ranks, Channels(links, own.now), begin)
            for link in links.values():
                link.close()
            mine = RankMeasurement(_memory(ranks_per_machine), to_next)
            measurements = gather(mine, own.now)
    except (OSError, RankLost, RuntimeError) as error:
        raise StageError(
            f"rank {rank} lost the connection to another rank while measuring links: check "
            f"whether a process has exited\n  {error}"
        ) from None
    found = [link_of(each.to_next) for each in measurements if each.to_next]
    if memory is None:
        memory = min(each.memory for each in measurements)
    return Cluster(num_ranks, memory, levels=levels_of(ranks_per_machine, found))


def link_of(seconds: MessageSeconds) -> Link:
    """Return the latency and bandwidth that explain the times of a small and a large message.

    >>> link_of(MessageSeconds(small=0.5, large=0.5 + LARGE / 1000))
    Link(latency=0.5, bandwidth=1000.0)
    """
    if seconds.large <= seconds.small:
        raise PlanError(
            f"a message of {format_bytes(LARGE)} took {seconds.large:.2g} s, no longer than one of "
            f"{SMALL} bytes: make sure that nothing else is running, and measure again"
        )
    return Link(seconds.small, LARGE / (seconds.large - seconds.small))


def levels_of(ranks_per_machine: int, links: Sequence[Link]) -> tuple[Level, ...]:
    """Return the levels of a cluster; `links[rank]` is the link from a rank to the next."""
    inside = [link for rank, link in enumerate(links, start=1) if rank % ranks_per_machine]
    between = links[ranks_per_machine - 1 :: ranks_per_machine]
    levels = (("machine", ranks_per_machine, inside), ("network", len(between) + 1, between))
    return tuple(
        Level(
            name,
            size,
            bandwidth=median(link.bandwidth for link in members),
            latency=median(link.latency for link in members),
        )
        for name, size, members in levels
        if members
    )


def count_ranks_per_machine(hosts: Sequence[str]) -> int:
    """Return the number of ranks on each machine, given the host name of each rank.

    Raise `PlanError` if machines have different numbers of ranks, or if the ranks of a machine are
    not consecutive: the levels of a cluster cannot describe that.

    >>> count_ranks_per_machine(["a", "a", "b", "b"])
    2
    """
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    names, sizes = zip(*runs, strict=True)
    if len(set(names)) < len(names):
        raise PlanError(
            f"ranks are on machines {', '.join(hosts)}, but the ranks of a machine have to be "
            "consecutive: number them as torchrun does"
        )
    if len(set(sizes)) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in runs)
        raise PlanError(
            f"there are {counts} ranks, but each machine needs the same number: start as many on "
            "each"
        )
    return int(sizes[0])


def _check(memory: ByteSize | None) -> None:
    if memory is not None:
        Device(memory)  # raises before anything is measured
    if not dist.is_initialized():
        raise PlanError(
            "there is no process group, but links are measured between its processes: call "
            "torch.distributed.init_process_group() under torchrun, or use `stageline links "
            "--num-processes 2`"
        )
    if dist.get_world_size() < 2:
        raise PlanError("the process group has 1 process, but a link needs 2: start more")


def _memory(ranks_per_machine: int) -> float:
    """Return the memory of this rank's device, or its share of the machine's."""
    if (num_bytes := device_memory()) is not None:
        return float(num_bytes)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_per_machine


def _measure(
    rank: int, num_ranks: int, channels: Channels, begin: Callable[[], None]
) -> MessageSeconds | None:
    """Return the median message times to the next rank, or None on the last rank.

    Each round measures every pair once while the other ranks wait, so that a machine that is
    slow for a while affects all links alike.
    """
    times: list[MessageSeconds] = []
    small, large = Probe.of(SMALL), Probe.of(LARGE)
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        for pair in pairwise(range(num_ranks)):
            begin()
            if rank in pair:
                pings = [_one_way(small, rank, pair, channels) for _ in range(SMALL_PER_LARGE)]
                seconds = MessageSeconds(median(pings), _one_way(large, rank, pair, channels))
                if rank == pair[0] and number >= WARM_UP_ROUNDS:
                    times.append(seconds)
            dist.barrier(channels.group)
    return MessageSeconds(*map(median, zip(*times, strict=True))) if times else None


def _one_way(probe: Probe, rank: int, pair: tuple[int, int], channels: Channels) -> float:
    """Send a message there and back, and return half of the time; valid on the first rank."""
    first, second = pair
    start = perf_counter()
    if rank == first:
        channels.send(probe, second)
        channels.receive(probe, second)
    else:
        channels.receive(probe, first)
        channels.send(probe, first)
    return (perf_counter() - start) / 2
