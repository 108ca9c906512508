"""Define the search problem, with times and sizes as flat lists by task for speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from stageline.costs import Costs
from stageline.schedules.action import Action, Kind
from stageline.schedules.action_times import ActionTimes
from stageline.schedules.edges import chain
from stageline.schedules.lower_bounds import ROUNDING, Bounds, lower_bounds
from stageline.schedules.placement import Placement, stages_by_rank
from stageline.schedules.schedule import Schedule
from stageline.schedules.task_graph import Dependencies, TaskNumbering, dependencies_of, run_lanes

T = TypeVar("T")
Lanes = list[list[int]]  # for each rank, its tasks in order
PHASES = (Kind.F, Kind.I, Kind.W)


@dataclass(frozen=True)
class SearchProblem:
    """The problem: order F, I and W on a placement with at most `limits[rank]` activations."""

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
        """Return the stages of each rank, ascending."""
        return stages_by_rank(self.placement, self.num_ranks)

    @cached_property
    def numbering(self) -> TaskNumbering:
        return TaskNumbering(self.num_stages, self.num_microbatches)

    @cached_property
    def durations(self) -> list[float]:
        """Return the duration of each task."""
        return self._by_task([self.times.durations[kind] for kind in PHASES])

    @cached_property
    def memory_changes(self) -> list[float]:
        """Return how much each task adds to its rank's activations; I and W free some."""
        activation, retained = self.activation, self.costs.per_stage("retained", self.num_stages)
        inputs = tuple(
            kept - all_of_it for all_of_it, kept in zip(activation, retained, strict=True)
        )
        return self._by_task([activation, inputs, tuple(-kept for kept in retained)])

    @cached_property
    def successors(self) -> list[tuple[int, float]]:
        """Return the task that needs each task's result, or -1, and the transfer time.

        Forwards go up to the last stage, input gradients down to the first.
        """
        size, last = self.num_microbatches, self.num_stages - 1
        num_forwards, transfer_time = size * self.num_stages, self.times.transfer_time
        successors: list[tuple[int, float]] = []
        for stage in range(self.num_stages):
            step, delay = (
                (size, transfer_time(stage, stage + 1)) if stage < last else (num_forwards, 0.0)
            )
            successors += [(task + step, delay) for task in range(stage * size, (stage + 1) * size)]
        successors += [(-1, 0.0)] * size
        for stage in range(1, self.num_stages):
            first, delay = num_forwards + stage * size, transfer_time(stage, stage - 1)
            successors += [(task - size, delay) for task in range(first, first + size)]
        return successors + [(-1, 0.0)] * num_forwards

    @cached_property
    def rank_of_task(self) -> list[int]:
        """Return the rank of each task."""
        return self._by_task([self.placement] * len(PHASES))

    def _by_task(self, phases: Sequence[Sequence[T]]) -> list[T]:
        size = self.num_microbatches
        return [value for phase in phases for value in phase for _ in range(size)]

    @cached_property
    def times(self) -> ActionTimes:
        return ActionTimes(self.costs, self.placement)

    @cached_property
    def dependencies(self) -> Dependencies:
        times = self.times
        edges = chain(self.num_stages)
        return dependencies_of(self.numbering, edges, times.transfer_time, times.lead)

    @cached_property
    def tolerance(self) -> float:
        """Return a tolerance: times that should be equal differ by less, from rounding."""
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
        """Return the tasks of a schedule, with each B split into I and W."""
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
        """Return the schedule of an order."""
        size, num_stages = self.num_microbatches, self.num_stages

        def action(task: int) -> Action:
            phase, stage = divmod(task // size, num_stages)
            return Action(stage, PHASES[phase], task % size)

        return Schedule.of((map(action, lane) for lane in lanes), self.placement, name)

    def fits(self, lane: list[int], rank: int) -> bool:
        """Return whether a rank's order stays within its memory limit."""
        held, limit, memory_changes = 0.0, self.limits[rank] * ROUNDING, self.memory_changes
        for task in lane:
            held += memory_changes[task]
            if held > limit:
                return False
        return True


@dataclass(frozen=True)
class Candidate:
    """An order with the times of its tasks; the one with the shortest longest span is best."""

    lanes: Lanes
    starts: list[float]
    ends: list[float]

    @staticmethod
    def of(problem: SearchProblem, lanes: Lanes) -> Candidate:
        """Return the candidate of an order."""
        run = run_lanes(lanes, problem.durations, problem.dependencies)
        return Candidate(lanes, run.starts, run.ends)

    @cached_property
    def span(self) -> float:
        return max(self.rank_span(rank) for rank in range(len(self.lanes)))

    def rank_span(self, rank: int) -> float:
        lane = self.lanes[rank]
        return self.ends[lane[-1]] - self.starts[lane[0]]

    @cached_property
    def score(self) -> tuple[float, float, float]:
        """Return longest span, makespan and the sum of the ends of F and I; lower is better."""
        num_forwards_and_inputs = len(self.ends) * 2 // 3
        late = sum(self.ends[:num_forwards_and_inputs])
        return _rounded(self.span), _rounded(max(self.ends)), late

    def reaches(self, bounds: Bounds) -> bool:
        """Return whether the order reaches the bounds, so that none is better."""
        span, makespan, _ = self.score
        return span <= _rounded(bounds.span) and makespan <= _rounded(bounds.makespan)


def _rounded(value: float) -> float:
    """Return a time with ten digits: the last ones of a sum depend on the order of its terms."""
    return float(f"{value:.10g}")
