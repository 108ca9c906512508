"""Costs from measured timelines: the median time of each stage's actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from statistics import median

from stageline.costs import Costs
from stageline.report.timeline import Timeline
from stageline.schedules.action import Action, Kind


def median_timeline(
    timelines: Sequence[Timeline], time: Callable[[Timeline], float] = attrgetter("makespan")
) -> Timeline:
    """Return the timeline whose time is the median."""
    return sorted(timelines, key=time)[len(timelines) // 2]


def median_costs(timelines: Sequence[Timeline]) -> Costs:
    """Return the median time of each stage's actions.

    Only the total time of a B is known, so half of it counts as I and half as W.
    """
    times = defaultdict(list)
    for timeline in timelines:
        for action, time in _time_of_actions(timeline).items():
            times[action.kind, action.stage].append(time)
    medians = {key: median(values) for key, values in times.items()}
    stages = range(timelines[0].num_stages)
    half = [medians.get((Kind.B, stage), 0.0) / 2 for stage in stages]
    return Costs(
        forward=[medians[Kind.F, stage] for stage in stages],
        input_grad=[medians.get((Kind.I, stage), half[stage]) for stage in stages],
        weight_grad=[medians.get((Kind.W, stage), half[stage]) for stage in stages],
    )


def _time_of_actions(timeline: Timeline) -> dict[Action, float]:
    """Return the time of each action; recomputation counts as part of its backward."""
    times: dict[Action, float] = defaultdict(float)
    for row in timeline.spans:
        for action, start, end in row:
            times[action] += end - start
    return times
