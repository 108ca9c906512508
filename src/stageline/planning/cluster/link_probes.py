"""Time round trips between two ranks, over the connections that a pipeline would use.

Between devices the host queues all of them, and then waits once. Each is timed by events:

    first rank   │ begin ─► send ──┐         ┌─► receive ─► end     the next one begins here
    second rank  │                 └─► receive ─► send
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.model.layers import Value
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.processes.channels.device_messages import ChannelStream
from stageline.runtime.backends.processes.channels.open_channels import (
    OpenedChannel,
    Pair,
    open_channels,
)
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.local_links import LocalLink, open_links
from stageline.runtime.backends.processes.messages.neighbours import connect_neighbours
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message
from stageline.schedules.action import Action, Kind

TIMEOUT = timedelta(minutes=1)  # to wait for another rank
ANY_KEY, ANY_VALUE = (0, Action(0, Kind.SEND_F, 0, peer=1)), Value(0, "x")


class Ways(Protocol):
    """The connections from this rank to others."""

    def round_trips(self, num_bytes: int, rank: int, pair: Pair, count: int) -> list[float]:
        """Send as many messages there and back; return the seconds of each, on the first rank."""


class HostWays(NamedTuple):
    """Messages in host memory: over links within the machine, and a group for all others."""

    links: Mapping[int, LocalLink]
    group: dist.ProcessGroup

    def round_trips(self, num_bytes: int, rank: int, pair: Pair, count: int) -> list[float]:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        layout = MessageLayout(True, (ANY_VALUE,), (ValueSpec.of(tensor),))
        return [self._round_trip(tensor, layout, rank, pair) for _ in range(count)]

    def _round_trip(self, tensor: Tensor, layout: MessageLayout, rank: int, pair: Pair) -> float:
        first, second = pair
        start = perf_counter()
        if rank == first:
            self._send(tensor, layout, second)
            self._receive(tensor, layout, second)
        else:
            self._receive(tensor, layout, first)
            self._send(tensor, layout, first)
        return perf_counter() - start

    def _send(self, tensor: Tensor, layout: MessageLayout, peer: int) -> None:
        if link := self.links.get(peer):
            link.send(ANY_KEY, layout, Message({ANY_VALUE: tensor}, 0.0))
        else:
            dist.send(tensor, peer, self.group)

    def _receive(self, tensor: Tensor, layout: MessageLayout, peer: int) -> None:
        if link := self.links.get(peer):
            link.take(ANY_KEY, layout)
        else:
            dist.recv(tensor, peer, self.group)


class DeviceWays(NamedTuple):
    """Messages between devices, over a channel for each direction."""

    accelerator: Accelerator
    ends: Mapping[Pair, ChannelStream]  # that begin or end here
    limit: float  # seconds, where the host has to wait for a channel

    def round_trips(self, num_bytes: int, rank: int, pair: Pair, count: int) -> list[float]:
        accelerator = self.accelerator
        there, back = self.ends[pair], self.ends[pair[1], pair[0]]
        is_first = rank == pair[0]
        halves = (
            (there, there.channel.send if is_first else there.channel.receive),
            (back, back.channel.receive if is_first else back.channel.send),
        )
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=accelerator.device)
        ready, trips = accelerator.record_event(), []
        for _ in range(count):
            times = []
            for end, operation in halves:
                with accelerator.queueing_on(end.stream):
                    accelerator.wait_event(ready)
                    times.append(accelerator.record_time())
                    operation(tensor).wait(self.limit)
                    times.append(accelerator.record_time())
                    ready = accelerator.record_event()
            trips.append((times[0], times[-1]))
        accelerator.wait_event(ready)
        accelerator.synchronize()
        return [accelerator.seconds_between(*trip) for trip in trips]


@contextmanager
def open_ways(
    pairs: Sequence[Pair], accelerator: Accelerator | None, group: dist.ProcessGroup
) -> Iterator[Ways]:
    """Open connections between pairs of ranks: channels of devices, or links of a machine."""
    ranks, limit = range(dist.get_world_size()), TIMEOUT.total_seconds()
    if accelerator is None:
        near = connect_neighbours(ranks, group, shares_memory=True)
        links = open_links(near, limit)
        yield HostWays(links, group)
        for link in links.values():
            link.close()
        return
    directions = sorted({(first, second) for pair in pairs for first, second in (pair, pair[::-1])})
    opened: dict[Pair, OpenedChannel] = {}
    with accelerator.rank_thread():
        open_channels(directions, [list(ranks)], accelerator, TIMEOUT, opened.__setitem__)
        ends = {pair: each.lane for pair, each in opened.items()}
        yield DeviceWays(accelerator, ends, limit)
        for each in opened.values():
            each.lane.channel.close()
            each.group.close()
