"""Decide from the measured steps of a running pipeline whether another balance would be faster.

    measured stages ─► times of layers, speeds of ranks ─► another balance ─► simulated: faster?

The time of a stage does not say which of its layers took it, nor whether the layers or their device
are slow. A profile gives the relative times of the layers. With one, the stage of a rank that is
closest to its expected time gives the speed of the rank's device, and what another of its stages
takes beyond that is attributed to its layers. Without one, all devices count as equally fast, and
the time of a stage is divided evenly among its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stageline.arguments import check_type
from stageline.costs import Costs
from stageline.errors import PlanError
from stageline.planning.partition.partition import partition_layers
from stageline.planning.profiling.profile_result import Profile
from stageline.report.timeline import Timeline
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule
from stageline.simulation.median_costs import median_costs
from stageline.simulation.simulate import simulate

MIN_GAIN = 0.05  # of a step; medians of few steps differ by some percent from trace to trace
MIN_TIME = 1e-9  # ms, in place of 0: no layer is free
TIMES = ("forward", "input_grad", "weight_grad")
Balance = tuple[int, ...]


@dataclass(frozen=True)
class Replan:
    """The number of layers of each stage, and the time of a step, before and after a replan.

    >>> print(Replan((4, 4), (5, 3), 36.0, 30.0))
    layers by stage: 5, 3 instead of 4, 4
    a step should take 30 ms instead of 36 (-16.7 %), not counting transfers
    """

    old_balance: Balance
    new_balance: Balance
    old_milliseconds: float
    new_milliseconds: float

    @property
    def moves(self) -> bool:
        """True if any layer moves to another stage."""
        return self.new_balance != self.old_balance

    def __str__(self) -> str:
        old, new = (", ".join(map(str, each)) for each in (self.old_balance, self.new_balance))
        if not self.moves:
            gain = f"{100 * MIN_GAIN:g} %"
            return f"layers by stage: {old}, unchanged: no balance was found that is {gain} faster"
        change = 100 * (self.new_milliseconds / self.old_milliseconds - 1)
        return (
            f"layers by stage: {new} instead of {old}\n"
            f"a step should take {self.new_milliseconds:.4g} ms instead of "
            f"{self.old_milliseconds:.4g} ({change:+.1f} %), not counting transfers"
        )


@dataclass(frozen=True)
class MeasuredTimes:
    """The measured times of a pipeline's stages, and the profiled times of its layers."""

    stages: Costs  # in ms
    layers: tuple[float, ...] | None  # None without a profile


def measured_times(
    schedule: Schedule,
    balance: Balance,
    layer_names: tuple[str, ...],
    timelines: Sequence[Timeline],
    profile: Profile | None,
) -> MeasuredTimes:
    """Return the median times of a pipeline's stages.

    Raise `PlanError` if a timeline or the profile is not of this pipeline.
    """
    check_type("timelines", timelines, (list, tuple), "use [timeline]", PlanError)
    if not timelines:
        raise PlanError("there is no timeline, but a measured one is needed: use pipe.trace()")
    for timeline in timelines:
        check_type("a timeline", timeline, Timeline, "use pipe.trace()", PlanError)
        _check_timeline(timeline, schedule, balance)
    layers = None if profile is None else _layer_times(profile, layer_names)
    return MeasuredTimes(median_costs(timelines), layers)


def _check_timeline(timeline: Timeline, schedule: Schedule, balance: Balance) -> None:
    ran = [{span.action for span in row} for row in timeline.spans]
    has_same_stages = timeline.placement == schedule.placement
    if not has_same_stages or ran != [set(row) for row in schedule.actions]:
        raise PlanError(
            "a timeline is not of a whole training step of this pipeline: trace one of its steps"
        )
    if timeline.balance not in (None, balance):
        raise PlanError(
            f"a timeline is of a pipeline with {timeline.balance} layers by stage, but this one "
            f"has {balance}: give timelines since the last replan only"
        )


def _layer_times(profile: Profile, layer_names: tuple[str, ...]) -> tuple[float, ...]:
    """Return each layer's time in the largest profiled micro-batch.

    The size hardly matters: only the ratios between layers are used.
    """
    check_type("profile", profile, Profile, "use sl.profile, or sl.estimate", PlanError)
    if profile.names != layer_names:
        raise PlanError(
            f"the profile is of a model with {len(profile.names)} layers, but this one has "
            f"{len(layer_names)}, or layers of other names: profile this model"
        )
    return tuple(layer.time for layer in profile.measurements[-1].layers)


def slowest_replica_times(replicas: Sequence[MeasuredTimes]) -> MeasuredTimes:
    """Return the time of each stage on its slowest replica, since replicas wait for each other."""
    times = {
        name: [each.stages.per_stage(name, _num_stages(each)) for each in replicas]
        for name in TIMES
    }
    slowest = {name: [max(column) for column in zip(*times[name], strict=True)] for name in TIMES}
    return MeasuredTimes(_costs(slowest), replicas[0].layers)


def _num_stages(measured: MeasuredTimes) -> int:
    assert isinstance(measured.stages.forward, tuple)  # medians are by stage
    return len(measured.stages.forward)


def choose_replan(schedule: Schedule, balance: Balance, measured: MeasuredTimes) -> Replan:
    """Return the best balance for the measured times, or the old one if the gain is too small."""
    layers = _LayerTimes.of(schedule.placement, balance, measured)
    other = layers.best_balance(schedule.placement)
    old = simulate(schedule, measured.stages).makespan
    new = simulate(schedule, layers.stage_costs(other, schedule.placement)).makespan
    if new > old * (1 - MIN_GAIN):
        return Replan(balance, balance, old, old)
    return Replan(balance, other, old, new)


@dataclass(frozen=True)
class _LayerTimes:
    """The times of each layer on a device of speed 1, and the speed of each rank."""

    times: Mapping[str, Sequence[float]]
    speeds: Sequence[float]

    @staticmethod
    def of(placement: Placement, balance: Balance, measured: MeasuredTimes) -> _LayerTimes:
        """Attribute times to layers such that the current stages take what was measured."""
        stages = _layers_by_stage(balance)
        by_stage = {name: measured.stages.per_stage(name, len(stages)) for name in TIMES}
        took = [max(sum(times), MIN_TIME) for times in zip(*by_stage.values(), strict=True)]
        layers = [max(time, MIN_TIME) for time in measured.layers or _evenly(took, balance)]
        expected = [sum(layers[number] for number in stage) for stage in stages]
        speeds = _speeds(_divide(expected, took), placement)
        times: dict[str, list[float]] = {name: [] for name in TIMES}
        for stage, (numbers, rank) in enumerate(zip(stages, placement, strict=True)):
            for name in TIMES:
                scale = by_stage[name][stage] * speeds[rank] / expected[stage]
                times[name] += [layers[number] * scale for number in numbers]
        return _LayerTimes(times, speeds)

    def best_balance(self, placement: Placement) -> Balance:
        totals = [sum(layer) for layer in zip(*self.times.values(), strict=True)]
        return partition_layers(totals, placement, self.speeds)

    def stage_costs(self, balance: Balance, placement: Placement) -> Costs:
        stages = _layers_by_stage(balance)
        speeds = [self.speeds[rank] for rank in placement]
        sums = {
            name: [sum(times[number] for number in stage) for stage in stages]
            for name, times in self.times.items()
        }
        return _costs({name: _divide(row, speeds) for name, row in sums.items()})


def _costs(times: Mapping[str, Sequence[float]]) -> Costs:
    forward, input_grad, weight_grad = (times[name] for name in TIMES)
    return Costs(forward, input_grad, weight_grad)


def _layers_by_stage(balance: Balance) -> list[range]:
    return [range(*pair) for pair in pairwise(accumulate(balance, initial=0))]


def _evenly(stage_times: Sequence[float], balance: Balance) -> list[float]:
    """Divide each stage's time evenly among its layers."""
    pairs = zip(stage_times, balance, strict=True)
    return [time / count for time, count in pairs for _ in range(count)]


def _speeds(by_stage: Sequence[float], placement: Placement) -> list[float]:
    """Return the speed of each rank: a slow device slows all its stages, so the fastest counts."""
    speeds = [0.0] * (max(placement) + 1)
    for rank, speed in zip(placement, by_stage, strict=True):
        speeds[rank] = max(speeds[rank], speed)
    return speeds


def _divide(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
