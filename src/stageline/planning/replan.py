"""Whether another cut would be faster, by what steps of a running pipeline took.

    measured stages ─► times of layers, speeds of ranks ─► another balance ─► simulated: worth it?

What a stage took says nothing about which of its layers took it, nor whether these are slow or
their device is. A profile says how layers compare. With one, a device is as slow as all stages of
its rank are, and what one of them takes beyond that is its layers'. Without one all devices count
as equal, and the layers of a stage share its time evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stageline.arguments import check_type
from stageline.costs import Costs
from stageline.errors import PlanError
from stageline.planning.explain import median_costs
from stageline.planning.partition.placed import balance_for
from stageline.planning.profiling.profile import Profile
from stageline.report.timeline import Timeline
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

WORTHWHILE = 0.05  # of a step; medians of few steps differ by some percent from trace to trace
TINY = 1e-9  # in place of 0: no layer is free
KINDS = ("forward", "input_grad", "weight_grad")
Balance = tuple[int, ...]


@dataclass(frozen=True)
class Replan:
    """Layers of each stage before and after, and what a step should take; the same if none move.

    >>> print(Replan((4, 4), (5, 3), 36.0, 30.0))
    layers by stage: 5, 3 instead of 4, 4
    a step should take 30 ms instead of 36 (-16.7 %), transfers not counted
    """

    old_balance: Balance
    new_balance: Balance
    old_milliseconds: float
    new_milliseconds: float

    @property
    def moves(self) -> bool:
        return self.new_balance != self.old_balance

    def __str__(self) -> str:
        old, new = (", ".join(map(str, each)) for each in (self.old_balance, self.new_balance))
        if not self.moves:
            worth = f"{100 * WORTHWHILE:g} %"
            return f"layers by stage: {old} as before, none was found that is {worth} faster"
        change = 100 * (self.new_milliseconds / self.old_milliseconds - 1)
        return (
            f"layers by stage: {new} instead of {old}\n"
            f"a step should take {self.new_milliseconds:.4g} ms instead of "
            f"{self.old_milliseconds:.4g} ({change:+.1f} %), transfers not counted"
        )


@dataclass(frozen=True)
class Observed:
    """What the stages of one pipeline took, and how its layers should compare."""

    stages: Costs  # in ms
    layers: tuple[float, ...] | None  # of a profile; None: there is none


def observed(
    schedule: Schedule,
    balance: Balance,
    names: tuple[str, ...],
    timelines: Sequence[Timeline],
    profile: Profile | None,
) -> Observed:
    """Raises if the timelines or the profile are not of this pipeline; `names` are its layers'."""
    check_type("timelines", timelines, (list, tuple), "use [timeline]", PlanError)
    if not timelines:
        raise PlanError("there is no timeline, but a measured one is needed: use pipe.trace()")
    for timeline in timelines:
        check_type("a timeline", timeline, Timeline, "use pipe.trace()", PlanError)
        _check_timeline(timeline, schedule, balance)
    return Observed(median_costs(timelines), None if profile is None else _times(profile, names))


def _check_timeline(timeline: Timeline, schedule: Schedule, balance: Balance) -> None:
    ran = [{span.action for span in row} for row in timeline.spans]
    is_ours = timeline.placement == schedule.placement
    if not is_ours or ran != [set(row) for row in schedule.actions]:
        raise PlanError(
            "a timeline is not of a whole training step of this pipeline: trace one of its steps"
        )
    if timeline.balance not in (None, balance):
        raise PlanError(
            f"a timeline is of a pipeline with {timeline.balance} layers by stage, but this one "
            f"has {balance}: give timelines since the last replan only"
        )


def _times(profile: Profile, names: tuple[str, ...]) -> tuple[float, ...]:
    """For the largest measured micro-batch: how layers compare hardly depends on it."""
    check_type("profile", profile, Profile, "use sl.profile, or sl.estimate", PlanError)
    if profile.names != names:
        raise PlanError(
            f"the profile is of a model with {len(profile.names)} layers, and not of this one with "
            f"{len(names)}, or they have other names: profile this model"
        )
    layers = profile.measurements[-1].layers
    return tuple(layer.time for layer in layers)


def slowest(found: Sequence[Observed]) -> Observed:
    """Of replicas, which wait for each other: each stage takes what its slowest replica takes."""
    rows = {kind: [each.stages.per_stage(kind, _count(each)) for each in found] for kind in KINDS}
    worst = {kind: [max(times) for times in zip(*rows[kind], strict=True)] for kind in KINDS}
    return Observed(_costs(worst), found[0].layers)


def _count(found: Observed) -> int:
    assert isinstance(found.stages.forward, tuple)  # medians are by stage
    return len(found.stages.forward)


def replanned(schedule: Schedule, balance: Balance, found: Observed) -> Replan:
    """The balance that these times ask for, if that makes a step shorter by what is worthwhile."""
    layers = _LayerTimes.of(schedule.placement, balance, found)
    other = layers.best_balance(schedule.placement)
    old = simulate(schedule, found.stages).makespan
    new = simulate(schedule, layers.stage_costs(other, schedule.placement)).makespan
    if new > old * (1 - WORTHWHILE):
        return Replan(balance, balance, old, old)
    return Replan(balance, other, old, new)


@dataclass(frozen=True)
class _LayerTimes:
    """Of each layer on a device of speed 1, by kind; and the speed of each rank."""

    by_kind: Mapping[str, Sequence[float]]
    speeds: Sequence[float]

    @staticmethod
    def of(placement: Placement, balance: Balance, found: Observed) -> _LayerTimes:
        """So that the stages, as they are now, take just what was measured."""
        stages = _stages(balance)
        kinds = {kind: found.stages.per_stage(kind, len(stages)) for kind in KINDS}
        took = [max(sum(times), TINY) for times in zip(*kinds.values(), strict=True)]
        expected = [max(time, TINY) for time in found.layers or _evenly(took, balance)]
        should = [sum(expected[number] for number in stage) for stage in stages]
        speeds = _speeds(_over(should, took), placement)
        by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for stage, (numbers, rank) in enumerate(zip(stages, placement, strict=True)):
            for kind in KINDS:
                scale = kinds[kind][stage] * speeds[rank] / should[stage]
                by_kind[kind] += [expected[number] * scale for number in numbers]
        return _LayerTimes(by_kind, speeds)

    def best_balance(self, placement: Placement) -> Balance:
        times = [sum(layer) for layer in zip(*self.by_kind.values(), strict=True)]
        return balance_for(times, placement, self.speeds)

    def stage_costs(self, balance: Balance, placement: Placement) -> Costs:
        stages = _stages(balance)
        speeds = [self.speeds[rank] for rank in placement]
        rows = {
            kind: [sum(times[number] for number in stage) for stage in stages]
            for kind, times in self.by_kind.items()
        }
        return _costs({kind: _over(row, speeds) for kind, row in rows.items()})


def _costs(by_kind: Mapping[str, Sequence[float]]) -> Costs:
    forward, input_grad, weight_grad = (by_kind[kind] for kind in KINDS)
    return Costs(forward, input_grad, weight_grad)


def _stages(balance: Balance) -> list[range]:
    return [range(*pair) for pair in pairwise(accumulate(balance, initial=0))]


def _evenly(took: Sequence[float], balance: Balance) -> list[float]:
    pairs = zip(took, balance, strict=True)
    return [time / count for time, count in pairs for _ in range(count)]


def _speeds(by_stage: Sequence[float], placement: Placement) -> list[float]:
    """A slow device slows down all of its stages: the fastest shows what it can do."""
    speeds = [0.0] * (max(placement) + 1)
    for rank, speed in zip(placement, by_stage, strict=True):
        speeds[rank] = max(speeds[rank], speed)
    return speeds


def _over(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return [time / other for time, other in zip(times, others, strict=True)]
