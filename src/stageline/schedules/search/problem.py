"""What the search is given, laid out flat for speed: times, sizes and limits by task and stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from stageline.costs import Costs
from stageline.schedules.action import Action, Kind
from stageline.schedules.bounds import ROUNDING, Bounds, lower_bounds
from stageline.schedules.edges import chain
from stageline.schedules.placement import Placement, stages_by_rank
from stageline.schedules.precedence import Numbering, Waits, run_lanes, waits_of
from stageline.schedules.schedule import Schedule
from stageline.schedules.times import Times

T = TypeVar("T")
Lanes = list[list[int]]  # for each rank, its tasks in order
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

    @property
    def num_tasks(self) -> int:
        return self.numbering.num_tasks

    @cached_property
    def stages(self) -> list[tuple[int, ...]]:
        """Of each rank, ascending."""
        return stages_by_rank(self.placement, self.num_ranks)

    @cached_property
    def numbering(self) -> Numbering:
        return Numbering(self.num_stages, self.num_microbatches)

    @cached_property
    def durations(self) -> list[float]:
        """By task."""
        return self._by_task([self.times.durations[kind] for kind in PHASES])

    @cached_property
    def takes(self) -> list[float]:
        """By task, what it adds to the activations of its rank; most tasks give some back."""
        activation, retained = self.activation, self.costs.per_stage("retained", self.num_stages)
        inputs = tuple(
            kept - all_of_it for all_of_it, kept in zip(activation, retained, strict=True)
        )
        return self._by_task([activation, inputs, tuple(-kept for kept in retained)])

    @cached_property
    def hops(self) -> list[tuple[int, float]]:
        """By task, the task that its result makes possible and the way there; -1 if there is none.

        Forwards go up to the last stage, input gradients down to the first.
        """
        size, last = self.num_microbatches, self.num_stages - 1
        num_forwards, way = size * self.num_stages, self.times.whole_way
        hops: list[tuple[int, float]] = []
        for stage in range(self.num_stages):
            step, delay = (size, way(stage, stage + 1)) if stage < last else (num_forwards, 0.0)
            hops += [(task + step, delay) for task in range(stage * size, (stage + 1) * size)]
        hops += [(-1, 0.0)] * size
        for stage in range(1, self.num_stages):
            first, delay = num_forwards + stage * size, way(stage, stage - 1)
            hops += [(task - size, delay) for task in range(first, first + size)]
        return hops + [(-1, 0.0)] * num_forwards

    @cached_property
    def homes(self) -> list[int]:
        """By task, its rank."""
        return self._by_task([self.placement] * len(PHASES))

    def _by_task(self, phases: Sequence[Sequence[T]]) -> list[T]:
        size = self.num_microbatches
        return [value for phase in phases for value in phase for _ in range(size)]

    @cached_property
    def times(self) -> Times:
        return Times(self.costs, self.placement)

    @cached_property
    def waits(self) -> Waits:
        return waits_of(self.numbering, chain(self.num_stages), self.times.whole_way)

    @cached_property
    def instant(self) -> float:
        """Too short to matter: times that should be equal differ by less, from rounding."""
        return 1e-9 * max(self.durations, default=0.0)

    @cached_property
    def activation(self) -> tuple[float, ...]:
        return self.costs.per_stage("activation", self.num_stages)

    @cached_property
    def bounds(self) -> Bounds:
        return lower_bounds(self.placement, self.num_microbatches, self.costs, self.limits)

    def stage_of(self, task: int) -> int:
        return task // self.num_microbatches % self.num_stages

    def lanes(self, schedule: Schedule) -> Lanes:
        """The order of a schedule, its B taken apart into I and W."""
        halves = {Kind.B: (Kind.I, Kind.W)}
        return [
            self.numbering.lane(
                action._replace(kind=kind)
                for action in row
                for kind in halves.get(action.kind, (action.kind,))
            )
            for row in schedule.actions
        ]

    def schedule(self, lanes: Lanes, name: str) -> Schedule:
        size, num_stages = self.num_microbatches, self.num_stages

        def action(task: int) -> Action:
            phase, stage = divmod(task // size, num_stages)
            return Action(stage, PHASES[phase], task % size)

        return Schedule.of((map(action, lane) for lane in lanes), self.placement, name)

    def fits(self, lane: list[int], rank: int) -> bool:
        """Whether a rank's order stays within its memory."""
        held, limit, takes = 0.0, self.limits[rank] * ROUNDING, self.takes
        for task in lane:
            held += takes[task]
            if held > limit:
                return False
        return True


@dataclass(frozen=True)
class Candidate:
    """An order and when its tasks run; the better of two has the shorter longest span."""

    lanes: Lanes
    starts: list[float]
    ends: list[float]

    @staticmethod
    def of(problem: Problem, lanes: Lanes) -> Candidate:
        run = run_lanes(lanes, problem.durations, problem.waits)
        return Candidate(lanes, run.starts, run.ends)

    @cached_property
    def span(self) -> float:
        return max(self.rank_span(rank) for rank in range(len(self.lanes)))

    def rank_span(self, rank: int) -> float:
        lane = self.lanes[rank]
        return self.ends[lane[-1]] - self.starts[lane[0]]

    @cached_property
    def score(self) -> tuple[float, float, float]:
        """The smaller the better: span, then makespan, then how late all F and I end."""
        num_forwards_and_inputs = len(self.ends) * 2 // 3
        late = sum(self.ends[:num_forwards_and_inputs])
        return _ten_digits(self.span), _ten_digits(max(self.ends)), late

    def reaches(self, bounds: Bounds) -> bool:
        """Whether it is proven that no order is better."""
        span, makespan, _ = self.score
        return span <= _ten_digits(bounds.span) and makespan <= _ten_digits(bounds.makespan)


def _ten_digits(value: float) -> float:
    """Equal sums of times differ in their last digits by the order of adding."""
    return float(f"{value:.10g}")
