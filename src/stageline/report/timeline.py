"""Define `Timeline`: when each action ran, simulated or measured, with measures and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stageline.costs import Costs
from stageline.report.idle import Idle, busy_share, span_bubble, steady_window, step_bubble
from stageline.report.memory import memory_curves
from stageline.report.spans import MemoryLevel, Spans, Transfer
from stageline.schedules.action_times import ActionTimes
from stageline.schedules.edges import Edge, Routes, chain
from stageline.schedules.lower_bounds import Bounds, lower_bounds, reached_or_bound
from stageline.schedules.placement import Placement, Replicas
from stageline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank with their times, simulated or measured; an immutable value."""

    spans: Spans
    placement: Placement
    costs: Costs | None = None  # None: only the times are known
    edges: tuple[Edge, ...] | None = None  # None: each stage reads the output of the previous one
    sent: tuple[Transfer, ...] | None = None  # None: messages did not queue
    name: str = field(default="", compare=False)
    idle: tuple[Idle, ...] = ()  # by rank, if measured
    balance: tuple[int, ...] | None = None  # layers of each stage, if measured
    replicas: Replicas = ()  # of each stage; () means one each

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def schedule(self) -> Schedule:
        """Return the schedule that was run."""
        rows = tuple(tuple(span.action for span in row) for row in self.spans)
        return Schedule(rows, self.placement, self.name, self.replicas)

    @cached_property
    def makespan(self) -> float:
        """Return the end of the last action on any rank; time starts at 0."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return how long each rank works."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def step_bubble(self) -> float:
        """Return the idle share of ranks × makespan: the loss if every step ends with a barrier."""
        return step_bubble(self.busy, self.makespan)

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """Return the time from each rank's own first action to its last."""
        return tuple(row[-1].end - row[0].start if row else 0.0 for row in self.spans)

    @property
    def span_bubble(self) -> float:
        """Return the idle share of the longest rank span: the loss without barriers."""
        return span_bubble(self.busy, self.rank_spans)

    @cached_property
    def steady_busy(self) -> tuple[float, ...]:
        """Return the busy share of each rank between fill and drain; () if there is no such time.

        That is from the time when the last rank has started its first backward until the first
        rank has started its last forward. A stream of many mini-batches sustains this share.

        >>> from stageline import build_schedule, simulate
        >>> sizes = {"num_ranks": 2, "num_microbatches": 1}
        >>> simulate(build_schedule("pipedream", **sizes, num_minibatches=8)).steady_busy
        (1.0, 1.0)
        """
        window = steady_window(self.spans)
        return tuple(busy_share(row, window) for row in self.spans) if window else ()

    @cached_property
    def memory(self) -> tuple[tuple[MemoryLevel, ...], ...]:
        """Return the memory that each rank holds over time."""
        if self.costs is None:
            return ()
        return memory_curves(self.spans, self.placement, self.costs, self.replicas)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Return the messages between ranks."""
        if self.sent is not None or self.costs is None:
            return self.sent or ()
        edges = chain(self.num_stages) if self.edges is None else self.edges
        return tuple(self._transfers_of(edges, self.costs))

    def _transfers_of(self, edges: Iterable[Edge], costs: Costs) -> Iterator[Transfer]:
        """Yield the messages of these edges, each sent when its value was computed."""
        routes = Routes(tuple(edges), self.placement)
        times = ActionTimes(costs, self.placement)
        for rank, row in enumerate(self.spans):
            for action, _, end in row:
                for send in routes.sends(action):
                    arrival = end + times.latency(send.stage, send.peer)
                    yield Transfer(rank, self.placement[send.peer], send, end, arrival)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Return the peak of each rank's activations, in the unit of `Costs.activation`."""
        return tuple(max((level.activations for level in row), default=0.0) for row in self.memory)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Return the peak of each rank's memory, including parameters and optimizer state."""
        return tuple(max((level.total for level in row), default=0.0) for row in self.memory)

    @property
    def lower_bound(self) -> float:
        """Return a proven lower bound on the makespan; 0 if there is none.

        It holds for all orders of F, I and W with this placement, these costs and no more
        activations on any rank than here.
        """
        return reached_or_bound(self._bounds.makespan, self.makespan)

    @property
    def span_lower_bound(self) -> float:
        """Return a proven lower bound on the longest rank span; see `lower_bound`."""
        return reached_or_bound(self._bounds.span, max(self.rank_spans, default=0.0))

    @cached_property
    def _bounds(self) -> Bounds:
        """Return both bounds; they require that every stage reads from the previous one.

        Further edges only add waiting. There are no bounds for stages with replicas.
        """
        is_chain = self.edges is None or set(chain(self.num_stages)) <= set(self.edges)
        if self.costs is None or not is_chain or self.replicas or not any(self.spans):
            return Bounds(0.0, 0.0)
        num_microbatches = self.schedule.total_microbatches
        return lower_bounds(self.placement, num_microbatches, self.costs, self.peak_activations)

    def save(self, path: str | Path) -> None:
        """Write a picture; the suffix is .svg, .html, or .json for ui.perfetto.dev."""
        from stageline.report.save import save  # noqa: PLC0415  most users need no picture

        save(self, path)

    def __repr__(self) -> str:
        sizes = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        return f"Timeline({self.name!r}, {sizes}, makespan={self.makespan:g})"

    def __str__(self) -> str:
        """Return a text grid with one row per rank, as wide as the terminal, if there is one."""
        from stageline.report.text.grid import plain, terminal_width  # noqa: PLC0415  as above

        return plain(self, terminal_width())
