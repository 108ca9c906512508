"""Predict the step time of candidates: exactly by simulation, or from a shorter or smaller one."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from stageline.costs import Costs
from stageline.planning.search.candidate import TIMES, PlanCandidate
from stageline.planning.search.candidate_schedules import try_build_sized
from stageline.planning.stream_period import min_time_per_microbatch, period_of
from stageline.report.timeline import Timeline
from stageline.schedules.placement import Replicas
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

MAX_STREAM_ACTIONS = 6_000  # of an asynchronous schedule to simulate; they take half a second


class StepPrediction(NamedTuple):
    """The predicted time of a step."""

    seconds: float  # if asynchronous, per mini-batch once the pipeline is full
    work_ends: float  # seconds after which only the gradients of other replicas are missing
    bubble: float  # idle share of all ranks until then


class StepTimePredictor:
    """Predicts step times. State: caches of schedules and of simulated periods."""

    def __init__(self) -> None:
        self.schedule = cache(try_build_sized)
        self._cached_period = cache(self._period)

    def predict(self, candidate: PlanCandidate, schedule: Schedule) -> StepPrediction:
        """Predict the time of a step with the whole schedule of a candidate."""
        if not candidate.shape.is_asynchronous:
            timeline = simulate(schedule, candidate.costs)
            seconds = step_seconds(candidate, timeline)
            work_ends = candidate.host + timeline.makespan
            return StepPrediction(seconds, work_ends, timeline.step_bubble)
        num_microbatches = candidate.layout.num_microbatches
        share = min(1.0, MAX_STREAM_ACTIONS / sum(map(len, schedule.actions)))
        simulated = max(candidate.num_short_run_microbatches, int(share * num_microbatches))
        seconds = self._stream_seconds(candidate, simulated)
        return StepPrediction(seconds, seconds, _idle_share(candidate, seconds))

    def predict_from_short_run(self, candidate: PlanCandidate, short: Schedule) -> StepPrediction:
        """Estimate what `predict` would return from a schedule of fewer micro-batches."""
        if candidate.shape.is_asynchronous:
            seconds = self._stream_seconds(candidate, short.num_microbatches)
            return StepPrediction(seconds, seconds, _idle_share(candidate, seconds))
        timeline = simulate(short, candidate.costs)
        missing = candidate.layout.num_microbatches - short.num_microbatches
        rest = missing * candidate.busiest_rank_seconds()
        seconds, makespan = step_seconds(candidate, timeline) + rest, timeline.makespan + rest
        bubble = _idle_share(candidate, makespan)
        return StepPrediction(seconds, candidate.host + makespan, bubble)

    def _stream_seconds(self, candidate: PlanCandidate, num_microbatches: int) -> float:
        """Extrapolate the time per mini-batch from one with fewer micro-batches.

        Each missing micro-batch takes the time of the slowest cycle in which ranks wait.
        """
        replicas = candidate.stage_replicas
        multiple = math.lcm(*replicas)
        simulated = num_microbatches // multiple * multiple
        missing = candidate.layout.num_microbatches - simulated
        period = self._cached_period(replicas, simulated, candidate.costs)
        work, transfers = candidate.work_and_transfers()
        recomputation = candidate.recomputation()
        (seconds,) = min_time_per_microbatch(work, transfers, replicas, recomputation)
        return period + missing * float(seconds)

    def _period(self, replicas: Replicas, num_microbatches: int, costs: Costs) -> float:
        """Simulate PipeDream's order, which 2BW shares: versions of weights take no time."""
        schedule = self.schedule(
            "pipedream", sum(replicas), num_microbatches, 1, stage_replicas=replicas
        )
        assert schedule is not None  # the number of micro-batches is a multiple
        return period_of(simulate(schedule, costs), num_microbatches)


def _idle_share(candidate: PlanCandidate, seconds: float) -> float:
    """Return the share of these seconds that ranks are idle, over all ranks."""
    work, _ = candidate.work_and_transfers()
    capacity = candidate.layout.num_ranks * seconds
    busy = candidate.layout.num_microbatches * float(work.sum())
    return max(0.0, 1 - busy / capacity) if capacity else 0.0  # rounding may make it negative


def step_seconds(candidate: PlanCandidate, timeline: Timeline) -> float:
    """Return the time until all work is done and all gradients are reduced over replicas.

    It begins with the call of the step, somewhat before the first action.
    """
    ends = [0.0] * timeline.num_stages
    for row in timeline.spans:
        for action, _, end in row:
            ends[action.stage] = max(ends[action.stage], end)
    pairs = zip(ends, candidate.reductions, strict=True)
    return candidate.host + max(end + seconds for end, seconds in pairs)


def seconds_from_fewer_ranks(candidate: PlanCandidate, schedule: Schedule) -> float:
    """Extrapolate the time of a step from a schedule of fewer ranks with as much work each.

    Waits grow with the number of ranks.
    """
    costs = candidate.mean_costs()
    load = sum(costs.per_rank(name, schedule.placement)[0] for name in TIMES)
    waits = simulate(schedule, costs).makespan - schedule.num_microbatches * load
    scale = (candidate.layout.num_ranks - 1) / (schedule.num_ranks - 1)
    work = candidate.layout.num_microbatches * candidate.busiest_rank_seconds()
    return candidate.host + work + scale * waits + min(candidate.reductions)
