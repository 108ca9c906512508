"""What was expected and what was measured, and what explains the difference.

    predicted ─► with the forwards that were measured ─► with the backwards too ─► measured

Each arrow is a simulation with one thing more as it was; what is left in the end is transfers, the
host's own work, and waits that no median shows.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median

from stageline.arguments import check_arguments
from stageline.costs import Costs
from stageline.errors import PlanError
from stageline.planning.plan import Plan
from stageline.planning.search.pace import period_of
from stageline.report.overlay import Overlay
from stageline.report.timeline import Timeline
from stageline.schedules.action import Action, Kind
from stageline.simulation.simulate import simulate


@dataclass(frozen=True)
class Explanation:
    """Milliseconds of a step; each but the first has one thing more as it was measured.

    Of an asynchronous schedule, from one mini-batch to the next at its full pace.
    """

    predicted: float
    with_forwards: float
    with_backwards: float
    measured: float
    plan: Plan = field(repr=False)
    step: Timeline = field(repr=False)  # of the measured ones that of the median time

    @property
    def overlay(self) -> Overlay:
        """What the plan expects over what was measured; `print` shows it in letters."""
        title = f"{self.plan.chosen.schedule}, predicted and measured in ms"
        return Overlay(self.plan.timeline, self.step, title, str(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the overlay as the suffix says: .svg or .html."""
        self.overlay.save(path)

    def __str__(self) -> str:
        parts = {
            "forwards": self.with_forwards - self.predicted,
            "backwards": self.with_backwards - self.with_forwards,
            "transfers, host and waits": self.measured - self.with_backwards,
        }
        told = ", ".join(f"{name} {part:+.4g} ms" for name, part in parts.items())
        off = 100 * (self.measured / self.predicted - 1)
        return (
            f"predicted {self.predicted:.4g} ms, measured {self.measured:.4g} ms ({off:+.1f} %): "
            f"{told}"
        )


def explain(plan: Plan, timelines: Sequence[Timeline]) -> Explanation:
    """For measured timelines of the plan's own pipeline, as `pipe.trace()` gives them.

    Of an asynchronous schedule, each of them has to have five mini-batches or more.
    """
    check_arguments(explain, locals(), PlanError)
    for timeline in timelines:
        if timeline.placement != plan.schedule.placement or not timeline.makespan:
            raise PlanError("a timeline is not of a step of this plan's pipeline: trace one of its")
    if not timelines:
        raise PlanError("there is no timeline, but a measured one is needed: use pipe.trace()")
    expected = plan.timeline
    assert expected.costs is not None  # it is simulated
    found = median_costs(timelines)
    forwards = replace(expected.costs, forward=found.forward)
    backwards = replace(
        forwards, input_grad=found.input_grad, weight_grad=found.weight_grad, recompute=0.0
    )
    time = _time_of(plan)
    return Explanation(
        time(expected),
        time(simulate(plan.schedule, forwards)),
        time(simulate(plan.schedule, backwards)),
        median(map(time, timelines)),
        plan,
        usual(timelines, time),
    )


def usual(
    timelines: Sequence[Timeline], time: Callable[[Timeline], float] = attrgetter("makespan")
) -> Timeline:
    """The one that took the median time."""
    return sorted(timelines, key=time)[len(timelines) // 2]


def _time_of(plan: Plan) -> Callable[[Timeline], float]:
    if not plan.chosen.is_asynchronous:
        return attrgetter("makespan")
    return lambda timeline: period_of(timeline, plan.chosen.num_microbatches)


def median_costs(timelines: Sequence[Timeline]) -> Costs:
    """What the actions of each stage took. Of a B only the sum counts, so its halves are equal."""
    took = defaultdict(list)
    for timeline in timelines:
        for action, time in _times(timeline).items():
            took[action.kind, action.stage].append(time)
    middle = {key: median(times) for key, times in took.items()}
    stages = range(timelines[0].num_stages)
    half = [middle.get((Kind.B, stage), 0.0) / 2 for stage in stages]
    return Costs(
        forward=[middle[Kind.F, stage] for stage in stages],
        input_grad=[middle.get((Kind.I, stage), half[stage]) for stage in stages],
        weight_grad=[middle.get((Kind.W, stage), half[stage]) for stage in stages],
    )


def _times(timeline: Timeline) -> dict[Action, float]:
    """A forward that is run again is part of its backward."""
    times: dict[Action, float] = defaultdict(float)
    for row in timeline.spans:
        for action, start, end in row:
            times[action] += end - start
    return times
