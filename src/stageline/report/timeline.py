"""When each action ran, simulated or measured: one value for both, with measures and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stageline.schedules.action import Action
from stageline.schedules.placement import Placement


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


@dataclass(frozen=True)
class Timeline:
    """What each rank did and when, and what it held in memory.

    `lower_bound` and `span_lower_bound` are proven: no order of F, I and W with this placement,
    these costs and no more activations on any rank has a smaller makespan, or longest span.
    """

    spans: tuple[tuple[Span, ...], ...]  # by rank
    placement: Placement
    memory: tuple[tuple[Level, ...], ...]  # by rank, in the order of time
    transfers: tuple[Transfer, ...] = ()
    name: str = ""
    lower_bound: float = field(default=0.0)
    span_lower_bound: float = field(default=0.0)

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last action on any rank."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank works."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def step_bubble(self) -> float:
        """Idle share of ranks × makespan: what is lost when every step ends with a barrier."""
        return 1.0 - sum(self.busy) / (self.num_ranks * self.makespan) if self.makespan else 0.0

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """From each rank's own first action to its last."""
        return tuple(row[-1].end - row[0].start if row else 0.0 for row in self.spans)

    @property
    def span_bubble(self) -> float:
        """Idle share of the longest rank span: what is lost when steps follow without a barrier."""
        longest, work = max(zip(self.rank_spans, self.busy, strict=True), default=(0.0, 0.0))
        return (longest - work) / longest if longest else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most that each rank's activations take, in the unit of `Costs.activation`."""
        return tuple(max((level.activations for level in row), default=0.0) for row in self.memory)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds, with parameters, optimizer state and working sets."""
        return tuple(max((level.total for level in row), default=0.0) for row in self.memory)

    def save(self, path: str | Path) -> None:
        """Draw it as the suffix says: .svg, .html, or .json for ui.perfetto.dev."""
        from stageline.report.files import save  # noqa: PLC0415  most need no picture

        save(self, path)

    def __str__(self) -> str:
        """A row for each rank; as wide as the terminal, if it is printed to one."""
        from stageline.report.text import plain, terminal_width  # noqa: PLC0415  as above

        return plain(self, terminal_width())
