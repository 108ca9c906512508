"""sl.explain: compare a plan's predicted step time with the measured one.

    predicted ─► with the measured forwards ─► with the measured backwards too ─► measured

Each arrow is a simulation with one more kind of measured time. The remaining difference is
transfers, work on the host, and waits that medians do not show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median

from stageline.arguments import check_arguments
from stageline.errors import PlanError
from stageline.planning.plan_result import Plan
from stageline.planning.stream_period import period_of
from stageline.report.overlay import Overlay
from stageline.report.timeline import Timeline
from stageline.simulation.median_costs import median_costs, median_timeline
from stageline.simulation.simulate import simulate


@dataclass(frozen=True)
class Explanation:
    """The predicted and the measured time of a step, and the simulated times between the two.

    All times are milliseconds. For an asynchronous schedule a step is the time from one mini-batch
    to the next once the pipeline is full.
    """

    predicted: float
    with_forwards: float  # simulated with the measured forwards
    with_backwards: float  # simulated with the measured backwards as well
    measured: float
    plan: Plan = field(repr=False)
    step: Timeline = field(repr=False)  # the measured timeline of median duration

    @property
    def overlay(self) -> Overlay:
        """The predicted timeline drawn over the measured one; printing it draws text."""
        title = f"{self.plan.chosen.schedule}, predicted and measured in ms"
        return Overlay(self.plan.timeline, self.step, title, str(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the overlay as a picture; the suffix, .svg or .html, selects the format."""
        self.overlay.save(path)

    def __str__(self) -> str:
        parts = {
            "forwards": self.with_forwards - self.predicted,
            "backwards": self.with_backwards - self.with_forwards,
            "transfers, host and waits": self.measured - self.with_backwards,
        }
        differences = ", ".join(f"{name} {part:+.4g} ms" for name, part in parts.items())
        error = 100 * (self.measured / self.predicted - 1)
        return (
            f"predicted {self.predicted:.4g} ms, measured {self.measured:.4g} ms "
            f"({error:+.1f} %): {differences}"
        )


def explain(plan: Plan, timelines: Sequence[Timeline]) -> Explanation:
    """Compare a plan with measured timelines of its pipeline, as `pipe.trace()` records them.

    For an asynchronous schedule each timeline needs five mini-batches or more.
    """
    check_arguments(explain, locals(), PlanError)
    for timeline in timelines:
        if timeline.placement != plan.schedule.placement or not timeline.makespan:
            raise PlanError(
                "a timeline is not of a step of this plan's pipeline: trace a step of a pipeline "
                "built with plan=plan"
            )
    if not timelines:
        raise PlanError("there is no timeline, but a measured one is needed: use pipe.trace()")
    expected = plan.timeline
    assert expected.costs is not None  # it is simulated
    measured = median_costs(timelines)
    forwards = replace(expected.costs, forward=measured.forward)
    backwards = replace(
        forwards, input_grad=measured.input_grad, weight_grad=measured.weight_grad, recompute=0.0
    )
    step_time = _step_time_function(plan)
    return Explanation(
        step_time(expected),
        step_time(simulate(plan.schedule, forwards)),
        step_time(simulate(plan.schedule, backwards)),
        median(map(step_time, timelines)),
        plan,
        median_timeline(timelines, step_time),
    )


def _step_time_function(plan: Plan) -> Callable[[Timeline], float]:
    """Return the function that gives the time of a step of this plan in a timeline."""
    if not plan.chosen.is_asynchronous:
        return attrgetter("makespan")
    return lambda timeline: period_of(timeline, plan.chosen.num_microbatches)
