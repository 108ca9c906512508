"""One rank in this process, the others elsewhere: messages travel over a process group.

The rank waits only for messages and collectives, where a failure of another rank reaches it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from stageline.errors import StageError
from stageline.model import trees
from stageline.model.layers import Value
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.backend import Group
from stageline.runtime.backends.failures import failure_text
from stageline.runtime.backends.processes.channels.device_messages import KnownForms
from stageline.runtime.backends.processes.channels.rank_channels import RankChannels
from stageline.runtime.backends.processes.collectives import ProcessCollectives
from stageline.runtime.backends.processes.connection import Connection
from stageline.runtime.backends.processes.groups import ProcessGroups
from stageline.runtime.backends.processes.messages.gloo_messages import Incoming
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.runtime.backends.processes.messages.shapes import ValueSpec, predict_specs
from stageline.runtime.devices import current
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.minibatch import Message, MessageKey, MiniBatch, Purpose, Stream
from stageline.runtime.optimizers.clipping import norm_table, norms_of
from stageline.runtime.optimizers.speculation import sent_as
from stageline.runtime.placement.layout import Layout
from stageline.schedules.action import NO_VERSION, ONCE, Action, Kind

SMALL = 2**20  # bytes of messages that may be held a little longer than they need

KINDS_KEPT = 8  # kinds of batches for which both ends of a channel know the forms of messages

Route = tuple[int, MessageLayout]  # to or from which rank a message goes, and what it holds


class ProcessesBackend:
    """Run the one rank of this process. State: the shapes and forms of messages that are known."""

    def __init__(
        self,
        groups: ProcessGroups,
        devices: Sequence[torch.device | None],
        accelerators: Sequence[Accelerator | None],
        timeout: float,
        *,
        fixed_forms: bool,
    ) -> None:
        self.connection = Connection(groups, timeout)
        self.incoming = Incoming(groups, timeout)
        self.rank = self.connection.rank
        self.device, self.accelerator = devices[self.rank], accelerators[self.rank]
        self.collectives = ProcessCollectives(self.connection, self.accelerator)
        self.channels = (
            None
            if self.accelerator is None
            else RankChannels(
                self.connection,
                accelerators,
                self.accelerator,
                self.incoming,
                fixed_forms=fixed_forms,
            )
        )
        self.shapes: dict[object, dict[Value, ValueSpec]] = {}  # by all that they depend on
        self.routes: dict[object, dict[Action, Route]] = {}  # of the last two kinds of batches
        self.known: dict[object, KnownForms] = {}  # by kind of batch, if messages go over channels

    def start(self, loop: Loop, stream: Stream) -> ProcessesRun:
        self.connection.check()
        self.connection.watch.user_error = ""
        return ProcessesRun(self, loop, stream)

    def close(self) -> None:
        self.connection.close()
        self.collectives.close()

    def known_of(self, loop: Loop, stream: Stream, minibatch: MiniBatch) -> KnownForms:
        """Return the forms that messages are known to have with batches of these sizes.

        Both ends of a channel have to find the same. So they depend on what all ranks have in
        common, which strides are not; and they are forgotten in the same mini-batch.
        """
        training = tuple(layer.module.training for layer in loop.layout.layers)
        sizes = tuple(_sizes(inputs) for inputs in minibatch.inputs)
        kind = loop, stream.purpose is Purpose.EVALUATE, sizes, training, minibatch.ambient
        if kind not in self.known:
            self.known = dict([*self.known.items()][1 - KINDS_KEPT :])
            self.known[kind] = {}
        return self.known[kind]

    def routes_of(self, loop: Loop, minibatch: MiniBatch) -> dict[Action, Route]:
        """Return the route of each message from or to this rank, by its send.

        Batches of the same shapes have the same routes, for as long as layers stay on their ranks.
        """
        training = tuple(layer.module.training for layer in loop.layout.layers)
        forms = tuple(_forms(inputs) for inputs in minibatch.inputs)
        batch = loop, forms, training, minibatch.ambient
        if batch not in self.routes:
            # of two kinds of batches only: the last one of an epoch may be shorter than the others
            self.routes = dict([*self.routes.items()][-1:])
            self.routes[batch] = self._routes(loop, minibatch, training, forms)
        return self.routes[batch]

    @property
    def _place(self) -> torch.device | None:
        """Return where layers are taken to be when shapes are predicted."""
        return None if self.accelerator is None else self.accelerator.device

    def _routes(
        self, loop: Loop, minibatch: MiniBatch, training: object, forms: Sequence[object]
    ) -> dict[Action, Route]:
        ambient = minibatch.ambient
        for form, inputs in zip(forms, minibatch.inputs, strict=True):
            if (form, training, ambient) not in self.shapes:
                found = predict_specs(loop.layout.layers, inputs, ambient, self._place)
                self.shapes[form, training, ambient] = found.specs
                self.connection.watch.position.unpredictable_from = found.unpredictable_from
        layouts: dict[object, MessageLayout] = {}
        routes = {}
        rank_of = loop.period.routes.rank_of
        for send in loop.values_of_message:
            here = rank_of(send.stage, send.microbatch)
            there = rank_of(send.peer, send.microbatch)
            if self.rank in (here, there) and send.microbatch < len(forms):
                form = forms[send.microbatch]
                key = send._replace(microbatch=0), form
                if key not in layouts:
                    layouts[key] = _layout(loop, send, self.shapes[form, training, ambient])
                routes[send] = (there if here == self.rank else here), layouts[key]
        return routes


class ProcessesTransport:
    """The messages of one stream.

    State: routes and known forms by mini-batch, and receives still to be posted.
    """

    def __init__(self, backend: ProcessesBackend, layout: Layout) -> None:
        self.backend, self.layout = backend, layout
        self.outgoing, self.incoming = backend.connection.outgoing, backend.incoming
        self.links = backend.connection.groups.links
        self.posts_receives = len(self.links) < layout.schedule.num_ranks - 1
        self.channels = backend.channels
        self.routes: dict[int, dict[Action, Route]] = {}
        self.known: dict[int, KnownForms] = {}
        self.asked: list[MessageKey] = []
        self.meetings: dict[MessageKey, Callable[[], Message]] = {}

    def send(self, key: MessageKey, message: Message) -> None:
        peer, layout = self._route(key)
        if link := self.links.get(peer):
            link.send(key, layout, message)
        elif self.channels is not None and peer in self.channels.outgoing.lanes:
            known = self.known[key[0]]
            self.channels.outgoing.send(peer, key[1], layout, message, known)
        else:
            self.outgoing.send(peer, layout, message)
            self.post()

    def expect(self, minibatch: int, receive: Action) -> None:
        if not self.posts_receives:
            return
        key = minibatch, sent_as(receive)._replace(version=receive.version)
        peer, layout = self._route(key)
        if self.channels is not None and peer in self.channels.incoming.lanes:
            self.channels.incoming.expect(peer, key, layout, self.known[minibatch])
        elif peer not in self.links:
            self.asked.append(key)

    def take(self, key: MessageKey) -> Message:
        if key[1].kind in ONCE:
            return self.meetings.pop(key)()
        peer, layout = self._route(key)
        if link := self.links.get(peer):
            return link.take(key, layout)
        if self.channels is not None and peer in self.channels.incoming.lanes:
            return self.channels.incoming.take(peer, key)
        return self.incoming.take(key)

    def post(self) -> None:
        """Post receives, after the sends that stand behind them: someone waits for what is sent."""
        for key in self.asked:
            self.incoming.expect(key, *self._route(key))
        self.asked.clear()

    def meet(self, rank: int, key: MessageKey, numbers: Mapping[int, Tensor]) -> None:  # noqa: ARG002
        if key[1].kind is Kind.REDUCE_TIED:
            # what follows exchanges gradients, and waits for all ranks itself
            self.meetings[key] = lambda: Message({}, 0.0)
            return
        table = norm_table(numbers, len(self.layout.parameter_numbers))
        arrive = self.backend.collectives.all_reduce(table, "norms", Group.PIPELINE)
        self.meetings[key] = lambda: Message(norms_of(arrive()), 0.0)

    def _route(self, key: MessageKey) -> Route:
        position, send = key
        if send.version != NO_VERSION:
            send = send._replace(version=NO_VERSION)
        return self.routes[position][send]


class ProcessesRun:
    """A stream on its way through the rank of this process, in the caller's thread."""

    def __init__(self, backend: ProcessesBackend, loop: Loop, stream: Stream) -> None:
        self.backend, self.loop, self.stream = backend, loop, stream
        self.connection, self.at = backend.connection, backend.connection.watch.position
        self.transport = ProcessesTransport(backend, loop.layout)

    def feed(self, minibatch: MiniBatch) -> None:
        self.stream.add(minibatch)
        position = minibatch.position
        self.connection.watch.is_starting = False
        self.at.step = minibatch.number
        transport, backend = self.transport, self.backend
        transport.routes[position] = backend.routes_of(self.loop, minibatch)
        transport.routes.pop(position - self.stream.lag - 1, None)
        if backend.channels is not None:
            backend.channels.connect(self.loop)
            transport.known[position] = backend.known_of(self.loop, self.stream, minibatch)
            transport.known.pop(position - self.stream.lag - 1, None)
        self._run(position)

    def wait(self, position: int) -> None:
        """Do nothing: `feed` returns when it is done."""

    def drain(self) -> None:
        for segment in self.stream.segments_to_drain:
            self._run(segment)
        if self.backend.channels is not None:
            with self._on_device():
                try:
                    self.backend.channels.outgoing.finish()
                except RankLost as lost:
                    raise self.connection.lost(lost, None, 0.0) from None

    def _on_device(self) -> AbstractContextManager[object]:
        accelerator = self.backend.accelerator
        if accelerator is None:
            return current(self.backend.device)
        return accelerator.rank_thread(lambda: self.at.action)

    def _run(self, segment: int) -> None:
        rank, stream, connection = self.backend.rank, self.stream, self.connection
        actions = self.loop.run(rank, segment, stream, self.transport)
        need: MessageKey | None = None
        asked = perf_counter()
        try:
            for link in connection.groups.near:
                link.begin_minibatch()
            with self._on_device():
                need = next(actions)
                while True:
                    position, self.at.action = stream.now[rank]
                    self.at.step = stream.minibatches[position].number
                    self.transport.post()
                    connection.outgoing.flush(beyond=SMALL)
                    asked = perf_counter()
                    need = actions.send(self.transport.take(need))
        except StopIteration:
            connection.outgoing.flush()
            self.at.action = None
        except RankLost as lost:
            raise connection.lost(lost, need[1] if need else None, asked) from None
        except StageError:
            raise
        except BaseException as error:
            text = failure_text(self.loop, stream, rank, error, connection.watch.name)
            raise connection.failed(connection.watch.report_failure(text)) from error


def _layout(loop: Loop, send: Action, known: Mapping[Value, ValueSpec]) -> MessageLayout:
    is_forward = send.kind is Kind.SEND_F
    values = loop.values_of_message[send]
    is_known = all(value in known for value in values)
    shapes = tuple(known[value] for value in values) if is_known else None
    return MessageLayout(is_forward, values, shapes)


def _forms(inputs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that the shapes of values depend on; cheaply for lone tensors."""
    return tuple(
        (name, value.shape, value.dtype, value.stride(), value.requires_grad)
        if isinstance(value, Tensor)
        else (name, repr(ValueSpec.of(value)), tuple(t.requires_grad for t in trees.tensors(value)))
        for name, value in sorted(inputs.items())
    )


def _sizes(inputs: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(
        (name, *((tensor.shape, tensor.dtype) for tensor in trees.tensors(value)))
        for name, value in sorted(inputs.items())
    )
