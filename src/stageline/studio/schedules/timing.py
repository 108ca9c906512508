"""When each action of an order runs, and what each rank holds, for given costs.

The times are those of `simulate` and the memory is that of `Timeline`, without a value for each
action: 49,000 actions take 20 ms instead of 250, so that a picture follows a slider.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stageline.costs import Costs
from stageline.report.memory import memory_changes
from stageline.schedules.action_times import ActionTimes
from stageline.schedules.edges import chain
from stageline.schedules.task_graph import NEVER, dependencies_of, run_lanes
from stageline.simulation.simulate import simulate
from stageline.studio.schedules.arrays import KINDS, ActionArrays

QUEUED = ("message", "reduce", "step")  # costs that only a program can be simulated with
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TimedActions:
    """The actions of an order with their times. Actions of a deadlock never run."""

    actions: ActionArrays
    costs: Costs
    starts: Numbers
    ends: Numbers
    never_run: npt.NDArray[np.bool_]

    @cached_property
    def makespan(self) -> float:
        return float(self.ends.max(initial=0.0))

    @cached_property
    def busy(self) -> list[float]:
        """Return how long each rank works."""
        lengths = self.ends - self.starts
        return [sum(lengths[row].tolist()) for row in self.actions.rows]

    @cached_property
    def rank_spans(self) -> list[float]:
        """Return the time from each rank's first action to its last."""
        rows = [(self.starts[row], self.ends[row]) for row in self.actions.rows]
        return [float(ends[-1] - starts[0]) if len(ends) else 0.0 for starts, ends in rows]


def timed(actions: ActionArrays, costs: Costs) -> TimedActions:
    """Return the times of an order. An order with a deadlock is timed up to it.

    What never runs is shown behind it, in the order of each rank.
    """
    costs.check_num_stages(actions.schedule.num_stages)
    if actions.schedule.is_stream or (any(map(costs.is_set, QUEUED)) and not actions.verdict):
        return _simulated(actions, costs)
    times = ActionTimes(costs, actions.schedule.placement)
    numbering, tasks = actions.numbering, actions.tasks
    by_action = np.array([times.durations[kind] for kind in KINDS])[actions.kinds, actions.stages]
    durations = np.zeros(numbering.num_tasks)
    durations[tasks] = by_action
    edges = chain(numbering.num_stages)
    dependencies = dependencies_of(numbering, edges, times.latency, times.lead)
    run = run_lanes(actions.lanes, durations.tolist(), dependencies)
    starts, ends = (np.array(values)[tasks] for values in (run.starts, run.ends))
    never_run = ends == NEVER
    if never_run.any():
        _put_behind(actions, by_action, starts, ends, run.progress)
    return TimedActions(actions, costs, starts, ends, never_run)


def _simulated(actions: ActionArrays, costs: Costs) -> TimedActions:
    timeline = simulate(actions.program, costs)
    spans = [span for row in timeline.spans for span in row]
    starts, ends = (np.array([span[i] for span in spans], float) for i in (1, 2))
    never_run = np.zeros(len(spans), bool)
    return TimedActions(ActionArrays(timeline.schedule), costs, starts, ends, never_run)


def _put_behind(
    actions: ActionArrays, durations: Numbers, starts: Numbers, ends: Numbers, progress: list[int]
) -> None:
    """Give actions that never run times behind those that do, without waiting for others."""
    for row, done in zip(actions.rows, progress, strict=True):
        stuck = slice(row.start + done, row.stop)
        since = ends[stuck.start - 1] if done else 0.0
        ends[stuck] = since + np.cumsum(durations[stuck])
        starts[stuck] = ends[stuck] - durations[stuck]


@dataclass(frozen=True, eq=False)
class HeldMemory:
    """The memory of each action's rank: from its start on, and from its end on."""

    during: Numbers
    after: Numbers
    peak_activations: list[float]  # by rank
    peaks: list[float]


def held_memory(work: TimedActions) -> HeldMemory:
    """Return the memory that ranks hold, which is that of `memory_curves`."""
    actions, costs = work.actions, work.costs
    num_stages = actions.schedule.num_stages
    static = costs.static(actions.schedule.placement)
    changes = memory_changes(num_stages, costs)
    table = np.array([changes[kind] for kind in KINDS])[actions.kinds, actions.stages]
    at_start, while_running, at_end = table.T
    copies = np.array(costs.per_stage("parameters", num_stages))[actions.stages] * actions.copies
    during, after = np.empty(actions.num_actions), np.empty(actions.num_actions)
    peak_activations, peaks = [], []
    for rank, row in enumerate(actions.rows):
        held = _alternating_sum(0.0, at_start[row], at_end[row])
        copied = np.maximum(copies[row], 0.0), np.minimum(copies[row], 0.0)
        weights = _alternating_sum(static[rank], *copied)
        during[row] = weights[0] + held[0] + while_running[row]
        after[row] = weights[1] + held[1]
        peak_activations.append(float(max(map(_largest, held))))
        peaks.append(float(max(static[rank], _largest(during[row]), _largest(after[row]))))
    return HeldMemory(during, after, peak_activations, peaks)


def _alternating_sum(first: float, at_start: Numbers, at_end: Numbers) -> tuple[Numbers, Numbers]:
    """Return the sum after each start and after each end, added up in this order."""
    steps = np.empty(1 + 2 * len(at_start))
    steps[0], steps[1::2], steps[2::2] = first, at_start, at_end
    sums = np.cumsum(steps)
    return sums[1::2], sums[2::2]


def _largest(values: Numbers) -> float:
    return float(values.max(initial=0.0))
