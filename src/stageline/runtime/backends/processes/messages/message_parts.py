"""Take a message apart to send it, and put it together again, whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.model.layers import Value
from stageline.runtime.backends.processes.messages.encoding import encode
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message
from stageline.runtime.exactness.in_place import Mark


class RankLost(Exception):  # noqa: N818  what it means is for others to say
    """Raised in a rank that did not get what it needs from another."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class MessageParts(NamedTuple):
    """What is sent of a message; `description` is empty if the receiver knows the layout."""

    layout: MessageLayout
    tensors: list[Tensor | None]
    aliased: list[int]  # positions of tensors that share their memory with others
    description: bytes


def parts_of_message(layout: MessageLayout, message: Message) -> MessageParts:
    """Return the tensors of a message, and what the receiver has to know to unpack them."""
    contents: Mapping[Value, Any] = message.contents
    tensors, aliased = layout.tensors(contents), list[int]()
    if message.marks:
        places = layout.places(contents)
        marks = (message.marks.get(place, Mark.NONE) for place in places)
        aliased = [i for i, mark in enumerate(marks) if mark & Mark.ALIASED]
    if layout.shapes is not None:
        return MessageParts(layout, tensors, aliased, b"")
    shapes = _actual_shapes(layout, contents)
    description = encode(tuple(shape.description for shape in shapes))
    return MessageParts(replace(layout, shapes=shapes), tensors, aliased, description)


def unpacked_message(layout: MessageLayout, buffer: Tensor) -> Message:
    """Return the message that a buffer holds."""
    return message_of(layout, *layout.packing.unpack(buffer))


def message_of(
    layout: MessageLayout, tensors: Sequence[Tensor | None], sent_at: float, aliased: Sequence[int]
) -> Message:
    """Return the message with these tensors; those at the positions `aliased` share memory."""
    contents = layout.contents(tensors)
    if not aliased:
        return Message(contents, sent_at)
    places = layout.places(contents)
    return Message(contents, sent_at, {places[position]: Mark.ALIASED for position in aliased})


def _actual_shapes(layout: MessageLayout, contents: Mapping[Value, Any]) -> tuple[ValueSpec, ...]:
    """Return the shapes of a message that depend on data; a gradient has those of its value."""
    if layout.is_forward:
        return tuple(ValueSpec.of(contents[value]) for value in layout.values)
    return tuple(
        ValueSpec.of([torch.empty(0) if t is None else t for t in contents[value]])
        for value in layout.values
    )
