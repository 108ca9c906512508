"""What the search is given, laid out flat for speed: times, sizes and limits by task and stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.costs import Costs
from stageline.schedules.action import Action, Kind
from stageline.schedules.bounds import Bounds, lower_bounds
from stageline.schedules.edges import chain
from stageline.schedules.placement import Placement
from stageline.schedules.precedence import Numbering, Run, Waits, run_lanes, waits_of
from stageline.schedules.schedule import Schedule
from stageline.schedules.times import Times

Lanes = list[list[int]]
PHASES = (Kind.F, Kind.I, Kind.W)


@dataclass(frozen=True)
class Problem:
    """The best order of F, I and W on this placement, with at most `limits[rank]` activations."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    limits: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.limits)

    @cached_property
    def stages(self) -> list[list[int]]:
        """Of each rank, ascending."""
        homes = list(enumerate(self.placement))
        return [[s for s, home in homes if home == rank] for rank in range(self.num_ranks)]

    @cached_property
    def times(self) -> Times:
        return Times(self.costs, self.placement)

    @cached_property
    def numbering(self) -> Numbering:
        return Numbering(self.num_stages, self.num_microbatches)

    @cached_property
    def durations(self) -> list[float]:
        """By task."""
        return [
            self.times.durations[kind][stage]
            for kind in PHASES
            for stage in range(self.num_stages)
            for _ in range(self.num_microbatches)
        ]

    @cached_property
    def waits(self) -> Waits:
        return waits_of(self.numbering, chain(self.num_stages), self.times.whole_way)

    @cached_property
    def activation(self) -> tuple[float, ...]:
        return self.costs.per_stage("activation", self.num_stages)

    @cached_property
    def retained(self) -> tuple[float, ...]:
        return self.costs.per_stage("retained", self.num_stages)

    @cached_property
    def bounds(self) -> Bounds:
        return lower_bounds(self.placement, self.num_microbatches, self.costs, self.limits)

    def run(self, lanes: Lanes) -> Run:
        return run_lanes(lanes, self.durations, self.waits)

    def schedule(self, lanes: Lanes, name: str) -> Schedule:
        size, stages = self.num_microbatches, self.num_stages
        rows = (
            [Action(task // size % stages, PHASES[task // size // stages], task % size) for task in lane]
            for lane in lanes
        )
        return Schedule.of(rows, self.placement, name)


def longest_span(lanes: Lanes, run: Run) -> float:
    return max(run.ends[lane[-1]] - run.starts[lane[0]] for lane in lanes)
