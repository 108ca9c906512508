"""Times of stages, layers and messages from the recorded steps of a run, ready to simulate with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import median, median_low

from stageline.costs import Costs
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runs.breakdown import recomputations
from stageline.runs.findings.even_cut import even_cut
from stageline.runs.records import Configuration, Metrics
from stageline.runs.run import Run
from stageline.runs.timelines import schedule_of
from stageline.schedules.action import Action, Kind
from stageline.schedules.schedule import Schedule
from stageline.simulation.median_costs import median_costs
from stageline.simulation.simulate import simulate

TIMES = ("forward", "input_grad", "weight_grad", "recompute")
Times = tuple[float, ...]  # one of each of TIMES
Balance = tuple[int, ...]
LEAST_TIME = 1e-6  # ms, in place of 0: no layer is free
SMALLEST = 9  # decimals of ms: less would be rounding errors, or a damaged file


@dataclass(frozen=True)
class MeasuredStep:
    """The median of a run's recorded steps, in milliseconds."""

    configuration: Configuration
    metrics: Metrics | None  # of the last report
    timeline: Timeline  # the latest recorded step
    makespan: float  # of the step
    stages: tuple[Times, ...]  # of a micro-batch on each stage
    transfers: tuple[float, ...]  # from the end of a stage's action to the start of the next one
    overheads: tuple[float, ...]  # of each stage, between two actions, for work on the host

    @staticmethod
    def of(run: Run) -> MeasuredStep | None:
        """Return the median step of a run; None if none was recorded."""
        if not run.measured:
            return None
        latest = run.measured[-1]
        return MeasuredStep(
            run.configuration,
            run.metrics[-1] if run.metrics else None,
            latest,
            median(timeline.makespan for timeline in run.measured),
            tuple(_stage_times(run.measured)),
            tuple(_transfers(run.measured)),
            tuple(_overheads(latest)),
        )

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_of(self.timeline)

    @cached_property
    def balance(self) -> Balance:
        """Return the number of layers of each stage; one each if it is not known."""
        return self.timeline.balance or (1,) * self.timeline.num_stages

    @cached_property
    def layers(self) -> tuple[Times, ...]:
        """Return the times of each layer: those of its stage, divided in proportion to costs."""
        costs = self.configuration.layer_costs
        if len(costs) != sum(self.balance):
            costs = (1.0,) * sum(self.balance)
        found: list[Times] = []
        for stage, numbers in enumerate(stages_of(self.balance)):
            own = [max(costs[number], LEAST_TIME) for number in numbers]
            found += (tuple(t * cost / sum(own) for t in self.stages[stage]) for cost in own)
        return tuple(found)

    @cached_property
    def between(self) -> float:
        """Return the time from the end of a step to the next one, of the slowest process."""
        if self.metrics is None:
            return 0.0
        last = self.metrics
        parts = (last.data_seconds, last.optimizer_seconds, last.save_seconds)
        return 1e3 * sum(max(part, default=0.0) for part in parts)

    @cached_property
    def simulated(self) -> float:
        """Return the time of the step in a simulation: what alternatives are compared with."""
        return self.simulate(self.schedule, self.stages).makespan

    def gain(self, milliseconds: float) -> float:
        """Return by how many percent a step gets shorter if the simulation takes this long."""
        if not self.simulated:
            return 0.0
        share = self.makespan / (self.makespan + self.between)
        return 100 * share * (1 - milliseconds / self.simulated)

    def simulate(
        self,
        schedule: Schedule,
        stages: Sequence[Times],
        scale: float = 1.0,
        transfers: Sequence[float] | None = None,
    ) -> Timeline:
        """Return a step with this schedule and these times of stages, each times `scale`."""
        return simulate(schedule, self._costs(schedule, stages, scale, transfers))

    def _costs(
        self,
        schedule: Schedule,
        stages: Sequence[Times],
        scale: float,
        transfers: Sequence[float] | None,
    ) -> Costs:
        """Return costs with what the host does between two actions, and with transfers.

        For another number of stages, all transfers and all overheads count as the median.
        """
        found = self.transfers if transfers is None else transfers
        overheads = self.overheads
        if len(stages) != len(self.stages):
            found = (median(found),) * len(stages)
            overheads = (median(overheads),) * len(stages)
        forward, inputs, weights, recompute = zip(*stages, strict=True)
        has_w = _splits(schedule)
        return Costs(
            forward=_plus(forward, scale, overheads),
            input_grad=_plus(inputs, scale, overheads),
            weight_grad=_plus(weights, scale, overheads if has_w else (0.0,) * len(stages)),
            recompute=_plus(recompute, scale, (0.0,) * len(stages)),
            transfer=_plus(found, 1.0, (0.0,) * len(stages)),
            # a stage holds its share of a rank's activations
            activation=len(set(schedule.placement)) / len(stages),
        )

    def stage_times(self, balance: Balance) -> tuple[Times, ...]:
        """Return the times of stages with these numbers of layers."""
        return tuple(
            tuple(map(sum, zip(*(self.layers[n] for n in numbers), strict=True)))
            for numbers in stages_of(balance)
        )

    def best_balance(self, num_stages: int) -> Balance | None:
        """Return the most even cut of the layers; None if there are too few of them."""
        if len(self.layers) < num_stages:
            return None
        return even_cut([sum(times) for times in self.layers], num_stages)

    def slowness(self) -> list[float]:
        """Return how much longer each rank takes than the same work takes elsewhere, from 1 up.

        The same work is what the plan expects, or stages of the same layers. A slow device slows
        all stages of a rank, so the least slow of them counts.
        """
        took = [max(sum(times), LEAST_TIME) for times in self.stages]
        ratios = [
            time / expected for time, expected in zip(took, self._expected(took), strict=True)
        ]
        usual = median_low(ratios)
        by_rank = [
            min(ratios[stage] for stage in self.schedule.stages_of(rank)) / usual
            for rank in range(self.schedule.num_ranks)
        ]
        return [max(1.0, ratio) for ratio in by_rank]

    def faster(self, by_rank: Sequence[float]) -> MeasuredStep:
        """Return the step as it would be if each rank were this many times as fast."""
        pairs = zip(self.stages, self.schedule.placement, strict=True)
        stages = (tuple(time / by_rank[rank] for time in times) for times, rank in pairs)
        return replace(self, stages=tuple(stages))

    def _expected(self, took: Sequence[float]) -> list[float]:
        plan = self.configuration.plan
        if plan is not None:
            planned = [plan.costs.get(name, ()) for name in TIMES]
            rows = [row for row in planned if len(row) == len(took)]
            totals = [sum(column) for column in zip(*rows, strict=True)]
            if len(totals) == len(took) and all(totals):
                return totals
        alike: dict[object, list[float]] = defaultdict(list)
        kinds = self._work()
        for kind, time in zip(kinds, took, strict=True):
            alike[kind].append(time)
        return [median_low(alike[kind]) for kind in kinds]

    def _work(self) -> list[object]:
        """Return what each stage works on; stages with equal values have the same work."""
        types, costs = self.configuration.layer_types, self.configuration.layer_costs
        if not len(types) == len(costs) == sum(self.balance):
            return list(range(len(self.balance)))  # not known: no two are the same
        modes = self.configuration.recompute
        return [
            (
                tuple(sorted((types[n], costs[n]) for n in numbers)),
                modes[stage] if stage < len(modes) else "",
            )
            for stage, numbers in enumerate(stages_of(self.balance))
        ]


def stages_of(balance: Balance) -> list[range]:
    """Return the numbers of the layers of each stage."""
    return [range(*pair) for pair in pairwise(accumulate(balance, initial=0))]


def _stage_times(timelines: Sequence[Timeline]) -> Iterator[Times]:
    """Yield the median times of each stage.

    A B is not divided in what was recorded: half of it counts as I, and half as W.
    """
    num_stages = timelines[-1].num_stages
    costs, again = median_costs(timelines), _recompute_times(timelines)
    splits = _splits(schedule_of(timelines[-1]))
    for stage, repeated in enumerate(again):
        forward, inputs, weights = (costs.per_stage(n, num_stages)[stage] for n in TIMES[:3])
        if splits:
            yield forward, max(0.0, inputs - repeated), weights, repeated
        else:
            half = max(0.0, inputs + weights - repeated) / 2
            yield forward, half, half, repeated


def _recompute_times(timelines: Sequence[Timeline]) -> list[float]:
    times: list[list[float]] = [[] for _ in timelines[-1].placement]
    for row in (row for timeline in timelines for row in timeline.spans):
        for span, is_again in zip(row, recomputations(row), strict=True):
            if is_again:
                times[span.action.stage].append(span.end - span.start)
    return [median(each) if each else 0.0 for each in times]


def _splits(schedule: Schedule) -> bool:
    return any(action.kind is Kind.W for row in schedule.actions for action in row)


def _plus(times: Iterable[float], scale: float, overheads: Iterable[float]) -> list[float]:
    pairs = zip(times, overheads, strict=True)
    return [round(scale * time + more, SMALLEST) for time, more in pairs]


def _overheads(timeline: Timeline) -> Iterator[float]:
    """Yield the host's time per action of each stage's rank."""
    for rank in timeline.placement:
        host = timeline.idle[rank].host if timeline.idle else 0.0
        yield host / max(len(timeline.spans[rank]), 1)


def _transfers(timelines: Sequence[Timeline]) -> Iterator[float]:
    """Yield the median time that messages between a stage and the next one were waited for."""
    waits: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for stage, wait in _waits(timeline):
            waits[stage].append(wait)
    for stage in range(timelines[0].num_stages):
        yield median(waits[stage]) if waits[stage] else 0.0


def _waits(timeline: Timeline) -> Iterator[tuple[int, float]]:
    """Yield the stage of a message and its time, if the rank that reads it was idle before.

    Where the rank was still busy when the message was sent, its time is hidden, and unknown.
    """
    ends = {span.action: span.end for row in timeline.spans for span in row}
    for row in timeline.spans:
        for before, span in pairwise(row):
            sender = _sender(span.action, timeline, ends)
            if sender is not None and _is_first_wait(before, span, ends[sender]):
                yield min(sender.stage, span.action.stage), span.start - ends[sender]


def _sender(action: Action, timeline: Timeline, ends: dict[Action, float]) -> Action | None:
    """Return the action on another rank whose message an action waits for."""
    before = action.stage - 1 if action.kind is Kind.F else action.stage + 1
    if action.kind is Kind.W or not 0 <= before < timeline.num_stages:
        return None
    if timeline.placement[before] == timeline.placement[action.stage]:
        return None
    sender = action._replace(stage=before)
    return sender if sender in ends else None


def _is_first_wait(before: Span, span: Span, sent: float) -> bool:
    return before.end < sent <= span.start
