"""Worlds of many ranks in one process, one after another: what each would call, in which order.

torch's fake process group takes the place of the others. Groups are made and messages are queued by
the code that runs on devices; what is recorded is compared between all ranks.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import chain as joined
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stageline.model.layers import Value
from stageline.runtime.backends.processes.channels.device_messages import (
    DeviceIncoming,
    DeviceOutgoing,
    KnownForms,
)
from stageline.runtime.backends.processes.channels.open_channels import (
    OpenedChannel,
    Pair,
    open_channels,
    pairs_of,
)
from stageline.runtime.backends.processes.channels.tensor_forms import TensorForm
from stageline.runtime.backends.processes.channels.torch_channel import TorchChannel
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.runtime.optimizers.speculation import sent_as
from stageline.schedules.action import Action, Kind
from stageline.schedules.program.program import RECEIVE_KIND
from stageline.schedules.program.stream import Period, PeriodEntry

X, NUMBER = Value(0, "x"), torch.zeros(1)
LAYOUTS = {
    kind: MessageLayout(kind is Kind.SEND_F, (X,), (ValueSpec.of(NUMBER),)) for kind in RECEIVE_KIND
}
FORMS = (TensorForm.of(NUMBER),)
LARGEST_REAL = 64  # ranks of a world in which all calls go to torch
PATIENCE = timedelta(minutes=1)
Calls = dict[Pair, list[MessageKey]]  # by channel, in the order in which a rank issues them


class AnyDevice:
    """A device whose streams nobody looks at."""

    device = torch.device("cpu")

    def new_stream(self, purpose: str) -> str:
        return purpose

    def queueing_on(self, stream: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def rank_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> None: ...

    def wait_event(self, event: None) -> None: ...

    def keep_alive(self, tensor: Tensor) -> None: ...


class World(NamedTuple):
    """What all ranks of a world call."""

    groups: list[Sequence[Sequence[int]]]  # by process: the members of each group that it makes
    sent: Calls
    received: Calls


class RankCalls:
    """One rank of a pipeline. State: its channels, and what it has issued on each of them."""

    def __init__(self, rank: int, period: Period, outgoing: Any, incoming: Any) -> None:
        self.rank, self.period = rank, period
        self.outgoing, self.incoming = outgoing, incoming
        self.known: KnownForms = {}  # of all messages from here and to here
        self.sent: Calls = defaultdict(list)
        self.received: Calls = defaultdict(list)

    def run(self, num_minibatches: int) -> None:
        """Issue what the rank's program does for some mini-batches."""
        for segment in range(num_minibatches + self.period.lag):
            for entry in self.period.rows[self.rank]:
                if 0 <= segment - entry.lag < num_minibatches:
                    self._carry_out(entry, segment - entry.lag)

    def _carry_out(self, entry: PeriodEntry, minibatch: int) -> None:
        action = entry.action
        if action.kind in RECEIVE_KIND:
            self._send((minibatch, action))
        elif action.kind in RECEIVE_KIND.values():
            self._expect((minibatch, sent_as(action)))
        else:
            for send in self.period.routes.awaited(action):
                self.incoming.take(self._ends(send)[0], (minibatch, send))

    def _send(self, key: MessageKey) -> None:
        ends = self._ends(key[1])
        self.known[key[1]] = FORMS
        message = Message({X: NUMBER if key[1].kind is Kind.SEND_F else [NUMBER]}, 0.0)
        with issuing() as issued:
            self.outgoing.send(ends[1], key[1], LAYOUTS[key[1].kind], message, self.known)
        assert issued == [(ends[1], "send")]
        self.sent[ends].append(key)

    def _expect(self, key: MessageKey) -> None:
        ends = self._ends(key[1])
        self.known[key[1]] = FORMS
        with issuing() as issued:
            self.incoming.expect(ends[0], key, LAYOUTS[key[1].kind], self.known)
        assert issued == [(ends[0], "receive")]
        self.received[ends].append(key)

    def _ends(self, send: Action) -> Pair:
        rank_of = self.period.routes.rank_of
        return rank_of(send.stage, send.microbatch), rank_of(send.peer, send.microbatch)


ISSUED: list[tuple[int, str]] = []


@contextmanager
def issuing() -> Iterator[list[tuple[int, str]]]:
    """Collect what is issued on channels, by the rank at the other end."""
    ISSUED.clear()
    yield ISSUED


class RecordedChannel(TorchChannel):
    def send(self, tensor: Tensor) -> Any:
        ISSUED.append((self.other, "send"))
        return super().send(tensor)

    def receive(self, tensor: Tensor) -> Any:
        ISSUED.append((self.other, "receive"))
        return super().receive(tensor)


def world_of(period: Period, num_replicas: int = 1, num_minibatches: int = 1) -> World:
    """Return what each rank of each replica calls; messages are those of the first replica."""
    num_ranks = len(period.rows)
    lines = [[r * num_ranks + n for n in range(num_ranks)] for r in range(num_replicas)]
    sends = (entry.action for row in period.rows for entry in row)
    pairs = pairs_of((s for s in sends if s.kind in RECEIVE_KIND), period.routes.rank_of)
    found = World([], {}, {})
    for here in joined.from_iterable(lines):
        with process(here, num_ranks * num_replicas) as groups:
            outgoing, incoming = _messages()
            _open(pairs, lines, here, outgoing, incoming)
            found.groups.append(tuple(groups))
            if here < num_ranks:
                calls = RankCalls(here, period, outgoing, incoming)
                calls.run(num_minibatches)
                assert not incoming.posted  # all that was received was needed
                found.sent.update(calls.sent)
                found.received.update(calls.received)
    return found


def _messages() -> tuple[Any, Any]:
    """Return both directions of a rank that knows the forms of all messages."""
    device: Any = AnyDevice()
    nobody: Any = None
    outgoing = DeviceOutgoing(device, nobody, 1.0, fixed_forms=True)
    return outgoing, DeviceIncoming(device, nobody, 1.0, fixed_forms=True)


def _open(
    pairs: Sequence[Pair], lines: Sequence[Sequence[int]], here: int, outgoing: Any, incoming: Any
) -> None:
    rank = next(line.index(here) for line in lines if here in line)

    def opened(pair: Pair, channel: OpenedChannel) -> None:
        if pair[0] == rank:
            outgoing.lanes[pair[1]] = channel.lane
        else:
            incoming.lanes[pair[0]] = channel.lane

    open_channels(pairs, lines, outgoing.accelerator, PATIENCE, opened)


@contextmanager
def process(rank: int, size: int) -> Iterator[list[Sequence[int]]]:
    """Be one process of a world; yield the members of the groups that it makes."""
    groups: list[Sequence[int]] = []
    make = dist.new_group

    def recorded(ranks: Sequence[int], **options: Any) -> Any:
        groups.append(tuple(ranks))
        # to be told by torch that a process is not a member takes 0.1 ms
        is_real = rank in ranks or size <= LARGEST_REAL
        return make(ranks, **options) if is_real else dist.GroupMember.NON_GROUP_MEMBER

    where = "stageline.runtime.backends.processes.channels.open_channels"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            mock.patch.object(dist, "new_group", recorded),
            mock.patch.object(dist, "get_default_backend_for_device", return_value="fake"),
            mock.patch(f"{where}.TorchChannel", RecordedChannel),
            warnings.catch_warnings(),
        ):
            # a fake group has no timeout to set
            warnings.filterwarnings("ignore", message="Set timeout is now only supported")
            yield groups
    finally:
        dist.destroy_process_group()
