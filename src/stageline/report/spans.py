"""The pieces of a timeline: when actions ran, messages flew, and how much was held."""

from __future__ import annotations

from typing import NamedTuple

from stageline.schedules.action import Action


class Span(NamedTuple):
    """One action of a rank, from its start to its end."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """One message between two ranks, as its send: `send.stage` made it, `send.peer` reads it."""

    source: int
    target: int
    send: Action
    start: float
    end: float


class Level(NamedTuple):
    """From `time` on, a rank holds this much: activations, and everything."""

    time: float
    activations: float
    total: float


Spans = tuple[tuple[Span, ...], ...]  # by rank
