"""Messages between devices: each tensor travels as it is, without a header, over a channel.

    rank 0 │ compute   F0 ─ event ─┐  F1 ─ event ─┐
           │ channel               └► send F0     └► send F1
    rank 1 │ channel   receive F0 ─ event ─┐  receive F1 ─ event ─┐
           │ compute                       └► F0                  └► F1

A receive is queued as early as the program says, and compute waits for it where the message is
needed. Memory to receive into is allocated on the channel's stream, so it is never memory that
compute still uses; when compute has used it, torch gives it back to the channel's stream. So there
are as many buffers as messages that are on their way or in use, and no pool of our own.

What a header would say of a message, its form, a small message over gloo tells beside the first one
of each kind: the same send with batches of the same shapes. After it both ends know. A sender
raises if a later message has another form. Values of which only the sender knows the shapes always
bring their form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from stageline.errors import BatchError, ModelError
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.processes.channels.channel import Channel, ChannelOperation
from stageline.runtime.backends.processes.channels.tensor_forms import (
    TensorForm,
    bytes_to_send,
    changes_between,
)
from stageline.runtime.backends.processes.messages.encoding import decode, encode
from stageline.runtime.backends.processes.messages.gloo_messages import Incoming, Outgoing
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.message_parts import (
    MessageParts,
    message_of,
    parts_of_message,
)
from stageline.runtime.backends.processes.messages.packing import check_tensor
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.schedules.action import NO_VERSION, Action

Forms = Sequence[TensorForm | None]  # of a message's tensors; a gradient may be missing
KnownForms = dict[Action, Forms]  # of messages with batches of the same shapes


class ChannelStream(NamedTuple):
    """A channel, and the stream that its messages are queued on."""

    channel: Channel
    stream: Any


class Promised(NamedTuple):
    """A message that is to be received."""

    key: MessageKey
    layout: MessageLayout
    known: KnownForms


class Posted(NamedTuple):
    """A message whose receives are queued."""

    layout: MessageLayout
    forms: Forms
    memories: list[Tensor]
    operations: list[ChannelOperation]
    arrived: Any  # an event


class DeviceOutgoing:
    """Messages to other ranks. State: the last operation on each channel."""

    def __init__(
        self, accelerator: Accelerator | None, host: Outgoing, limit: float, *, fixed_forms: bool
    ) -> None:
        self.own, self.host, self.limit = accelerator, host, limit
        self.fixed_forms = fixed_forms
        self.lanes: dict[int, ChannelStream] = {}  # by rank
        self.last: dict[int, ChannelOperation] = {}

    def send(
        self, peer: int, send: Action, layout: MessageLayout, message: Message, known: KnownForms
    ) -> None:
        """Queue a message behind what compute has queued."""
        accelerator, lane = self.accelerator, self.lanes[peer]
        parts = parts_of_message(layout, message)
        tensors = [
            tensor if tensor is None else self._on_device(tensor) for tensor in parts.tensors
        ]
        forms = self._tell(peer, send, parts, tensors, known)
        made = accelerator.record_event()
        with accelerator.queueing_on(lane.stream):
            accelerator.wait_event(made)
            for tensor, form in zip(tensors, forms, strict=True):
                if tensor is not None and form is not None and form.num_elements:
                    self.last[peer] = lane.channel.send(bytes_to_send(tensor, form))
                    accelerator.keep_alive(tensor)

    @property
    def accelerator(self) -> Accelerator:
        assert self.own is not None  # a channel ends at accelerators only
        return self.own

    def finish(self) -> None:
        """Let compute wait until all messages have been sent: a caller may change their tensors."""
        for peer, operation in self.last.items():
            operation.wait(self.limit)
            with self.accelerator.queueing_on(self.lanes[peer].stream):
                left = self.accelerator.record_event()
            self.accelerator.wait_event(left)
        self.last.clear()

    def _on_device(self, tensor: Tensor) -> Tensor:
        is_there = tensor.device.type == self.accelerator.device.type
        return tensor if is_there else self.accelerator.upload(tensor)

    def _tell(
        self,
        peer: int,
        send: Action,
        parts: MessageParts,
        tensors: Sequence[Tensor | None],
        known: KnownForms,
    ) -> Forms:
        """Return the forms of tensors; tell the receiver, unless it knows them."""
        aliased = set(parts.aliased)
        forms = tuple(
            None if tensor is None else TensorForm.of(tensor, is_aliased=position in aliased)
            for position, tensor in enumerate(tensors)
        )
        send = _plain(send)
        before = known.get(send)
        if before is None:
            if not parts.description:
                for tensor, spec in zip(tensors, parts.layout.packing.specs, strict=True):
                    if tensor is not None:
                        check_tensor(tensor, spec)
                if self.fixed_forms:
                    known[send] = forms
            self.host.send_bytes(peer, encode((str(send), parts.description, forms)))
        elif before != forms:
            raise ModelError(
                f"the message {send} has another form than in the first step with a batch of this "
                f"shape: {changes_between(before, forms)}; the receiver knows the first one only: "
                "build the pipeline again after such a change, or let each message bring its form, "
                "with options=sl.Options(fixed_message_forms=False)"
            )
        return forms


class DeviceIncoming:
    """Messages from other ranks. State: those that are promised, and those with receives queued."""

    def __init__(
        self, accelerator: Accelerator | None, host: Incoming, limit: float, *, fixed_forms: bool
    ) -> None:
        self.own, self.host, self.limit = accelerator, host, limit
        self.fixed_forms = fixed_forms
        self.lanes: dict[int, ChannelStream] = {}  # by rank
        self.promised: dict[int, deque[Promised]] = {}  # by rank, in the order of the sends
        self.posted: dict[MessageKey, Posted] = {}

    def expect(self, peer: int, key: MessageKey, layout: MessageLayout, known: KnownForms) -> None:
        """Queue the receives of a message; if its form has yet to come, when it is needed."""
        promised = self.promised.setdefault(peer, deque())
        promised.append(Promised(key, layout, known))
        while promised and _plain(promised[0].key[1]) in promised[0].known:
            self._post(peer)

    @property
    def accelerator(self) -> Accelerator:
        assert self.own is not None  # a channel ends at accelerators only
        return self.own

    def take(self, peer: int, key: MessageKey) -> Message:
        """Return a message, for which compute waits from here on."""
        while key not in self.posted:
            self._post(peer)
        layout, forms, memories, operations, arrived = self.posted.pop(key)
        sent_at = max((each.wait(self.limit) for each in operations), default=0.0)
        self.accelerator.wait_event(arrived)
        for memory in memories:
            self.accelerator.keep_alive(memory)
        rest = iter(memories)
        tensors = [None if form is None else form.tensor_in(next(rest)) for form in forms]
        aliased = [n for n, form in enumerate(forms) if form is not None and form.is_aliased]
        return message_of(layout, tensors, sent_at, aliased)

    def _post(self, peer: int) -> None:
        """Queue the receives of the next message from a rank, when its form is known."""
        key, layout, known = self.promised[peer].popleft()
        accelerator, lane = self.accelerator, self.lanes[peer]
        forms = known.get(_plain(key[1]))
        if forms is None:
            layout, forms, is_fixed = self._told(peer, key, layout)
            if is_fixed and self.fixed_forms:
                known[_plain(key[1])] = forms
        there = [form for form in forms if form is not None]
        with accelerator.queueing_on(lane.stream):
            memories = [form.memory(accelerator.device) for form in there]
            operations = [
                lane.channel.receive(form.bytes_in(memory))
                for form, memory in zip(there, memories, strict=True)
                if form.num_elements
            ]
            arrived = accelerator.record_event()
        self.posted[key] = Posted(layout, forms, memories, operations, arrived)

    def _told(
        self, peer: int, key: MessageKey, layout: MessageLayout
    ) -> tuple[MessageLayout, Forms, bool]:
        """Wait for the form of a message; return it, and whether later ones have the same."""
        name, description, forms = decode(self.host.receive_bytes(peer))
        if description:
            shapes = tuple(map(ValueSpec.from_description, decode(description)))
            return replace(layout, shapes=shapes), forms, False
        if name != str(_plain(key[1])) or not _fits(layout, forms):
            raise BatchError(
                f"rank {peer} sends {name} with tensors of shape "
                f"{', '.join(str(form.shape) for form in forms if form is not None) or 'none'}, "
                f"but this rank expects {key[1]} with other shapes: do all ranks have batches of "
                "the same shapes and dtypes?"
            )
        return layout, forms, True


def _fits(layout: MessageLayout, forms: Forms) -> bool:
    """Return whether tensors of these forms follow from the rank's own batch."""
    if layout.shapes is None or len(layout.packing.specs) != len(forms):
        return False
    pairs = zip(layout.packing.specs, forms, strict=True)
    return all(
        form is None or (form.shape, form.dtype) == (spec.shape, spec.dtype) for spec, form in pairs
    )


def _plain(send: Action) -> Action:
    """Return a send without its version: a message that is sent again has the same form."""
    return send if send.version == NO_VERSION else send._replace(version=NO_VERSION)
