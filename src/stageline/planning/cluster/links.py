"""The links between the processes of a group: each rank with the next, one pair at a time.

    rank 0 ◄─► rank 1 ◄─► rank 2 ◄─► rank 3
    └── machine a ──┘     └── machine b ──┘       the one in the middle is the network's

These are the links that most messages of a pipeline take, and their number grows as that of the
ranks does, not as that of all pairs. A small message there and back takes the latency twice; a
large one takes the bytes over the bandwidth beside it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
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
from stageline.planning.cluster.cluster import Cluster, Device, Level, Size
from stageline.planning.progress import progress_of
from stageline.runtime.backends.processes.exchange import gather
from stageline.runtime.backends.processes.groups import OwnedGroup
from stageline.units import format_bytes

SMALL, LARGE = 64, 2**23  # bytes
PINGS = 10  # small messages for a large one
WARM_UP, ROUNDS = 2, 7  # the first do not count: buffers are new, connections are just made
LIMIT = timedelta(minutes=1)  # to wait for another rank


class Seconds(NamedTuple):
    """That a message takes one way."""

    small: float
    large: float


class Told(NamedTuple):
    """What a rank knows: its memory, and what messages to the next rank take, if there is one."""

    memory: float
    to_next: Seconds | None


def measure_links(*, memory: Size | None = None, progress: bool = True) -> Cluster:
    """A cluster of all ranks, with links as they were measured; all ranks call it, and all get it.

    There is a level for the ranks of a machine, which have one host name, and one for machines; its
    link is the median of those in it. `memory` is that of one device; by default the GPU's, or what
    a machine has for each of its ranks, wherever that is least.
    """
    _check(memory)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    try:
        with closing(OwnedGroup(dist.new_group(backend="gloo", timeout=LIMIT))) as own:
            size = ranks_of_a_machine(gather(socket.gethostname(), own.now))
            total = (WARM_UP + ROUNDS) * (num_ranks - 1)
            with progress_of(total, "exchanges", shown=progress and rank == 0) as begin:
                to_next = _measured(rank, num_ranks, own.now, begin)
            told = gather(Told(_memory(size), to_next), own.now)
    except RuntimeError as error:
        raise StageError(
            f"rank {rank} lost touch with another while links were measured: has one of them "
            f"ended?\n  {error}"
        ) from None
    links = [link_of(each.to_next) for each in told if each.to_next]
    least = min(each.memory for each in told)
    return Cluster(num_ranks, least if memory is None else memory, levels=levels_of(size, links))


def link_of(seconds: Seconds) -> Link:
    """What a small message takes is latency; what a large one takes beyond that is its bytes.

    >>> link_of(Seconds(small=0.5, large=0.5 + LARGE / 1000))
    Link(latency=0.5, bandwidth=1000.0)
    """
    if seconds.large <= seconds.small:
        raise PlanError(
            f"a message of {format_bytes(LARGE)} took {seconds.large:.2g} s, no longer than one of "
            f"{SMALL} bytes: is something else running? measure again"
        )
    return Link(seconds.small, LARGE / (seconds.large - seconds.small))


def levels_of(size: int, links: Sequence[Link]) -> tuple[Level, ...]:
    """`links[rank]` is the one to the next rank; a machine has `size` ranks."""
    inside = [link for rank, link in enumerate(links, start=1) if rank % size]
    between = links[size - 1 :: size]
    found = (("machine", size, inside), ("network", len(between) + 1, between))
    return tuple(
        Level(
            name,
            count,
            bandwidth=median(link.bandwidth for link in joining),
            latency=median(link.latency for link in joining),
        )
        for name, count, joining in found
        if joining
    )


def ranks_of_a_machine(hosts: Sequence[str]) -> int:
    """The same number on each, in a row; otherwise levels cannot tell who is where.

    >>> ranks_of_a_machine(["a", "a", "b", "b"])
    2
    """
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    names, sizes = zip(*runs, strict=True)
    if len(set(names)) < len(names):
        raise PlanError(
            f"ranks are on machines {', '.join(hosts)}, but those of one machine have to follow "
            "each other: number them as torchrun does"
        )
    if len(set(sizes)) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in runs)
        raise PlanError(
            f"there are {counts} ranks, but each machine needs as many: start as many on each"
        )
    return int(sizes[0])


def _check(memory: Size | None) -> None:
    if memory is not None:
        Device(memory)  # raises before anything is measured
    if not dist.is_initialized():
        raise PlanError(
            "there is no process group, but links are between its processes: call "
            "torch.distributed.init_process_group() under torchrun, or use `stageline profile "
            "--links --ranks 2`"
        )
    if dist.get_world_size() < 2:
        raise PlanError("the process group has 1 process, but a link needs 2: start more")


def _memory(num_ranks: int) -> float:
    """Of this rank's GPU, which has not run on hardware, or of a machine with so many ranks."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks


def _measured(
    rank: int, num_ranks: int, group: dist.ProcessGroup, begin: Callable[[], None]
) -> Seconds | None:
    """To the next rank, if there is one. In rounds over all pairs, while the others wait: what
    slows the machines down for a while slows all links down, and not one.
    """
    taken: list[Seconds] = []
    small, large = (torch.zeros(size, dtype=torch.uint8) for size in (SMALL, LARGE))
    for turn in range(WARM_UP + ROUNDS):
        for pair in pairwise(range(num_ranks)):
            begin()
            if rank in pair:
                pings = [_there_and_back(small, rank, pair, group) for _ in range(PINGS)]
                seconds = Seconds(median(pings), _there_and_back(large, rank, pair, group))
                if rank == pair[0] and turn >= WARM_UP:
                    taken.append(seconds)
            dist.barrier(group)
    return Seconds(*map(median, zip(*taken, strict=True))) if taken else None


def _there_and_back(
    message: Tensor, rank: int, pair: tuple[int, int], group: dist.ProcessGroup
) -> float:
    """Half of the time, for the first of the two."""
    first, second = pair
    start = perf_counter()
    if rank == first:
        dist.send(message, second, group)
        dist.recv(message, second, group)
    else:
        dist.recv(message, first, group)
        dist.send(message, first, group)
    return (perf_counter() - start) / 2
