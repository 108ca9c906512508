"""When each action ran, simulated or measured: one value for both, with measures and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stageline.costs import Costs
from stageline.report.measures.idle import Idle
from stageline.report.measures.memory import memory_curves
from stageline.report.measures.steady import busy_share, steady_window
from stageline.report.measures.transfers import transfers
from stageline.report.spans import Level, Spans, Transfer, Unmeasured
from stageline.schedules.edges import Edge, chain
from stageline.schedules.lower_bounds import Bounds, lower_bounds
from stageline.schedules.placement import Placement, Replicas
from stageline.schedules.schedule import Schedule

ROUNDED = 1 - 1e-9  # sums of times differ in their last digits by the order of adding


@dataclass(frozen=True)
class Timeline:
    """What each rank did and when; from it and the costs follow memory, messages and bounds."""

    spans: Spans
    placement: Placement
    costs: Costs | None = None  # None: nothing is known but the times
    edges: tuple[Edge, ...] | None = None  # None: each stage reads what the one before it wrote
    sent: tuple[Transfer, ...] | None = None  # None: messages did not wait for each other
    name: str = field(default="", compare=False)
    idle: tuple[Idle, ...] = ()  # by rank, if it was measured
    balance: tuple[int, ...] | None = None  # layers of each stage, if it was measured
    replicas: Replicas = ()  # of each stage; (): one

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def schedule(self) -> Schedule:
        """What ran, in the order in which it did."""
        rows = tuple(tuple(span.action for span in row) for row in self.spans)
        return Schedule(rows, self.placement, self.name, self.replicas)

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
        longest = max(self.rank_spans, default=0.0)
        pairs = zip(self.rank_spans, self.busy, strict=True)
        work = max((work for span, work in pairs if span >= longest * ROUNDED), default=0.0)
        return max(0.0, (longest - work) / longest) if longest else 0.0

    @cached_property
    def steady_busy(self) -> tuple[float, ...]:
        """The busy share of each rank between fill and drain; () if it drains before it is full.

        That is from when the last rank has begun its first backward until the first rank has begun
        its last forward: what a stream of many mini-batches keeps up.

        >>> from stageline import build_schedule, simulate
        >>> sizes = {"num_ranks": 2, "num_microbatches": 1}
        >>> simulate(build_schedule("pipedream", **sizes, num_minibatches=8)).steady_busy
        (1.0, 1.0)
        """
        window = steady_window(self.spans)
        return tuple(busy_share(row, window) for row in self.spans) if window else ()

    @cached_property
    def memory(self) -> tuple[tuple[Level, ...], ...]:
        """What each rank holds, in the order of time."""
        if self.costs is None:
            return ()
        return memory_curves(self.spans, self.placement, self.costs, self.replicas)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The messages between ranks."""
        if self.sent is not None or self.costs is None:
            return self.sent or ()
        edges = chain(self.num_stages) if self.edges is None else self.edges
        return tuple(transfers(self.spans, self.placement, edges, self.costs))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most that each rank's activations take, in the unit of `Costs.activation`."""
        return tuple(max((level.activations for level in row), default=0.0) for row in self.memory)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds, with parameters, optimizer state and working sets."""
        return tuple(max((level.total for level in row), default=0.0) for row in self.memory)

    @property
    def lower_bound(self) -> float:
        """Proven: with this placement, these costs and no more activations on any rank than here,
        no order of F, I and W has a smaller makespan. 0 if nothing is proven.
        """
        return _reached(self._bounds.makespan, self.makespan)

    @property
    def span_lower_bound(self) -> float:
        """The same for the longest rank span."""
        return _reached(self._bounds.span, max(self.rank_spans, default=0.0))

    @cached_property
    def _bounds(self) -> Bounds:
        """They hold if every stage reads from the one before it; other edges only add waiting.

        Of stages on several ranks nothing is proven.
        """
        is_chain = self.edges is None or set(chain(self.num_stages)) <= set(self.edges)
        if self.costs is None or not is_chain or self.replicas or not any(self.spans):
            return Bounds(0.0, 0.0)
        num_microbatches = self.schedule.total_microbatches
        return lower_bounds(self.placement, num_microbatches, self.costs, self.peak_activations)

    def save(self, path: str | Path) -> None:
        """Draw it as the suffix says: .svg, .html, or .json for ui.perfetto.dev."""
        from stageline.report.files import save  # noqa: PLC0415  most need no picture

        save(self, path)

    def __repr__(self) -> str:
        if isinstance(self.spans, Unmeasured):
            return "Timeline(still being measured)"
        sizes = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        return f"Timeline({self.name!r}, {sizes}, makespan={self.makespan:g})"

    def __str__(self) -> str:
        """A row for each rank; as wide as the terminal, if it is printed to one."""
        from stageline.report.text.grid import plain, terminal_width  # noqa: PLC0415  as above

        return plain(self, terminal_width())


def _reached(bound: float, reached: float) -> float:
    """A bound that is reached is what was reached, to the last digit."""
    return reached if abs(bound - reached) <= 1e-9 * reached else bound
