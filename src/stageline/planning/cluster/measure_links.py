"""sl.measure_links: measure the links between the processes of a group, one pair at a time.

    rank 0 ◄─► rank 1 ◄─► rank 2 ◄─► rank 3
    └── machine a ──┘     └── machine b ──┘       the link in the middle is the network

Each rank exchanges messages with the next. Most messages of a pipeline take these links, and their
number grows linearly with the ranks, where that of all pairs grows with the square. The round trip
of a small message is twice the latency; a large one takes its bytes over the bandwidth on top.
Messages go where those of a pipeline go: over a channel between devices, or from host to host,
through shared memory within a machine, else over gloo.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from stageline.costs import Link
from stageline.errors import PlanError, StageError
from stageline.model.device_settings import device_types, with_index
from stageline.planning.cluster.cluster import ByteSize, Cluster, Device, Level
from stageline.planning.cluster.link_probes import TIMEOUT, open_ways
from stageline.planning.console import progress_bar
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.measured_devices import device_memory
from stageline.runtime.backends.processes.channels.open_channels import Pair
from stageline.runtime.backends.processes.exchange import gather
from stageline.runtime.backends.processes.groups import OwnedGroup
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.runtime.devices import accelerators_of, by_rank
from stageline.units import format_bytes

SMALL, LARGE = 64, 2**23  # bytes of a message
SMALL_PER_LARGE = 10  # small messages for each large one
# The first rounds do not count: buffers are newly allocated, connections newly made.
WARM_UP_ROUNDS, ROUNDS = 2, 7


class MessageSeconds(NamedTuple):
    """The one-way time of a small and of a large message."""

    small: float
    large: float


def measure_links(
    *,
    device: torch.device | str | None = None,
    memory: ByteSize | None = None,
    progress: bool = True,
) -> Cluster:
    """Measure the links between all ranks and return them as a cluster, the same on every rank.

    All ranks have to call it. With a `device`, the one of this rank, messages go from device to
    device, and else between the memories of hosts. The cluster has a level for the ranks of one
    machine, which share a host name, and one for the machines; each level has the median of its
    links. `memory` is that of one device. By default it is the GPU's memory, or the machine's
    divided by its number of ranks, and the smallest over all ranks.
    """
    _check(memory)
    accelerator = None if device is None else _accelerator(device)
    num_ranks = dist.get_world_size()
    is_shown = progress and dist.get_rank() == 0
    with _connected() as group:
        ranks_per_machine = count_ranks_per_machine(gather(socket.gethostname(), group))
        pairs = [*pairwise(range(num_ranks))]
        with progress_bar(num_rounds() * len(pairs), "exchanges", enabled=is_shown) as begin:
            seconds = measure_pairs(pairs, accelerator, group, begin)
        memories = gather(_memory(ranks_per_machine), group)
    links = [link_of(seconds[pair]) for pair in pairs]
    if memory is None:
        memory = min(memories)
    return Cluster(num_ranks, memory, levels=levels_of(ranks_per_machine, links))


def measure_pairs(
    pairs: Sequence[Pair],
    accelerator: Accelerator | None,
    group: dist.ProcessGroup,
    begin: Callable[[], None] = lambda: None,
) -> dict[Pair, MessageSeconds]:
    """Return the median message times between pairs of ranks, the same on every rank.

    `group` is one of gloo, of all ranks. Each round measures every pair once while the other ranks
    wait, so that a machine that is slow for a while affects all links alike.
    """
    rank = dist.get_rank()
    # of three between devices the first may begin before the other rank has queued its own
    num_large = 1 if accelerator is None else 3
    times: dict[Pair, list[MessageSeconds]] = {}
    with open_ways(pairs, accelerator, group) as ways:
        for number in range(num_rounds()):
            for pair in pairs:
                begin()
                if rank in pair:
                    small = median(ways.round_trips(SMALL, rank, pair, SMALL_PER_LARGE))
                    large = median(ways.round_trips(LARGE, rank, pair, num_large))
                    if number >= WARM_UP_ROUNDS:
                        times.setdefault(pair, []).append(MessageSeconds(small / 2, large / 2))
                dist.barrier(group)
    own = {pair: MessageSeconds(*map(median, zip(*t, strict=True))) for pair, t in times.items()}
    everyone = gather(own, group)
    return {pair: everyone[pair[0]][pair] for pair in pairs}


def num_rounds() -> int:
    """Return how often each pair is measured."""
    return WARM_UP_ROUNDS + ROUNDS


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


def _accelerator(device: torch.device | str) -> Accelerator | None:
    """Return a device's accelerator, or None for the CPU."""
    (place,) = by_rank([device], 1)
    assert place is not None
    is_here = place.type in device_types() and torch.accelerator.is_available()
    if place.type != "cpu" and not is_here:
        raise PlanError(
            f"device is {str(device)!r}, but torch finds no such device here: omit it to measure "
            "messages between the memories of hosts"
        )
    return accelerators_of([with_index(place)], simulated=False)[0]


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


@contextmanager
def _connected() -> Iterator[dist.ProcessGroup]:
    """Connect all ranks over gloo; an error says that a rank was lost."""
    rank = dist.get_rank()
    try:
        with closing(OwnedGroup(dist.new_group(backend="gloo", timeout=TIMEOUT))) as own:
            yield own.now
    except (OSError, RankLost, RuntimeError) as error:
        raise StageError(
            f"rank {rank} lost the connection to another rank while measuring links: check "
            f"whether a process has exited\n  {error}"
        ) from None
