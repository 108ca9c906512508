"""Open a channel for each direction between two ranks in which a program sends messages.

Each has a process group of its own, of two processes. All processes make all groups, in the same
order, also those that they are not part of, which costs them some microseconds each: torch numbers
groups, and a group that only its members make (`use_local_synchronization`) is named by how many
groups a process has made, so that members who have made different numbers wait for each other for
ever. A group of NCCL connects when it is first used, and blocks the host until both ends do. So
each channel carries a byte at once, again in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.backends.processes.channels.channel import Channel
from stageline.runtime.backends.processes.channels.device_messages import ChannelStream
from stageline.runtime.backends.processes.channels.ordered_channel import OrderedChannel
from stageline.runtime.backends.processes.channels.torch_channel import TorchChannel
from stageline.runtime.backends.processes.groups import OwnedGroup, own_group
from stageline.schedules.action import Action

Pair = tuple[int, int]  # the rank that sends, and the rank that receives
# A receive is queued before its message is sent, and a loader may be slow: who waits for too long
# is for the watch to say.
LONGEST = timedelta(days=1)


class OpenedChannel(NamedTuple):
    """A channel that begins or ends here, and its group."""

    lane: ChannelStream
    group: OwnedGroup


def pairs_of(sends: Iterable[Action], rank_of: Callable[[int, int], int]) -> list[Pair]:
    """Return the pairs of ranks that have messages for each other, in the order of all processes.

    `rank_of` returns the rank that runs a micro-batch on a stage.
    """
    ends = (
        (rank_of(send.stage, send.microbatch), rank_of(send.peer, send.microbatch))
        for send in sends
    )
    return sorted({(source, target) for source, target in ends if source != target})


def open_channels(
    pairs: Sequence[Pair],
    lines: Sequence[Sequence[int]],
    accelerator: Accelerator | None,
    connect: timedelta,
    opened: Callable[[Pair, OpenedChannel], None],
) -> None:
    """Open the channels of all pairs, and return those that begin or end here.

    All processes call this with the same pairs and lines: the global ranks of each pipeline.
    `accelerator` is this process's; without one, no channel ends here. `connect` is how long
    members of a group wait for each other.
    """
    here = dist.get_rank()
    device = "cpu" if accelerator is None else accelerator.device
    backend = dist.get_default_backend_for_device(device)
    for pair in pairs:
        rows = [[line[rank] for rank in pair] for line in lines]
        group = own_group(rows, connect, LONGEST, backend)
        if group is not None:
            assert accelerator is not None  # there is a channel between accelerators only
            line = next(line for line in lines if here in line)
            opened(
                pair, OpenedChannel(_connected(pair, line.index(here), group, accelerator), group)
            )


def _connected(pair: Pair, rank: int, group: OwnedGroup, accelerator: Accelerator) -> ChannelStream:
    """Return this rank's end of a channel, when a byte has been sent or received."""
    name = f"messages from rank {pair[0]} to rank {pair[1]}"
    other = pair[1] if rank == pair[0] else pair[0]
    stream = accelerator.new_stream(name)
    lane = ChannelStream(_channel(group.now, other, accelerator, stream), stream)
    with accelerator.queueing_on(lane.stream):
        byte = torch.zeros(1, dtype=torch.uint8, device=accelerator.device)
        (lane.channel.send if rank == pair[0] else lane.channel.receive)(byte)
    return lane


def _channel(
    group: dist.ProcessGroup, other: int, accelerator: Accelerator, stream: Any
) -> Channel:
    if isinstance(accelerator, CheckedAccelerator):
        observe = partial(accelerator.simulation.run_in_channel, stream)
        return OrderedChannel(group, other, stream.name, observe)
    return TorchChannel(group, other)
