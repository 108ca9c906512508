"""Define the parts of a timeline: spans of actions, transfers of messages, memory levels."""

from __future__ import annotations

from typing import NamedTuple

from stageline.schedules.action import Action


class Span(NamedTuple):
    """One action of a rank, with its start and end."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """One message between two ranks; `send.stage` made it, `send.peer` reads it."""

    source: int
    target: int
    send: Action
    start: float
    end: float


class MemoryLevel(NamedTuple):
    """The memory that a rank holds from `time` on: activations only, and in total."""

    time: float
    activations: float
    total: float


Spans = tuple[tuple[Span, ...], ...]  # by rank
