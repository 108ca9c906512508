"""Ways to train: how devices and samples are divided, in which order, and what each stage costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from stageline.costs import PER_STAGE, Costs
from stageline.errors import PlanError, ScheduleError
from stageline.planning.partition.chain import Floats
from stageline.planning.partition.placed import balance_for
from stageline.planning.partition.replicas import divisions, whole_turns
from stageline.planning.partition.room import Room
from stageline.planning.partition.stages import Cut, Machines, reductions, stage_costs
from stageline.planning.search.layouts import Grid, Layout, Task, layouts, sample_sizes
from stageline.planning.search.pace import least_pace, least_period, period_of
from stageline.report.memory import peak_memory
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.build import build_schedule, family_of, schedule_names
from stageline.schedules.placement import Placement, Replicas, loop, side_by_side, wave
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

SCHEDULES = tuple(name for name in schedule_names(synchronous=True) if name != "naive")
TIMES = ("forward", "input_grad", "weight_grad", "recompute")
CHUNKS = (2, 4)  # stages that a rank has, where that can be chosen
LONG = 6_000  # actions of a stream that are simulated; they take half a second


class Family(NamedTuple):
    """What is known of a schedule before it is built."""

    placement: Placement
    in_halves: bool
    is_stream: bool = False  # mini-batch follows mini-batch without a flush


@dataclass(frozen=True)
class Way:
    """A way to train; its costs follow from the rest."""

    layout: Layout
    name: str
    family: Family
    cut: Cut
    costs: Costs
    reductions: tuple[float, ...]  # by stage, seconds that follow its last backward

    @property
    def chunks(self) -> int:
        return max(1, len(self.family.placement) // self.layout.num_ranks)

    @property
    def stages(self) -> Replicas:
        """Ranks of each stage of a stream."""
        return self.layout.grid.stages or (1,) * self.layout.num_ranks

    @property
    def num_actions(self) -> int:
        return 3 * len(self.family.placement) * self.layout.num_microbatches

    def bound(self) -> float:
        """Seconds below which no order is: a rank works, and waits for one micro-batch both ways.

        It comes through the forwards of the first stages of all ranks before it, and goes back
        through their backwards; with halves, weight gradients may fill the time in which it goes.
        Some stage's gradients are summed when all of its rank's work is done.
        A stream never waits for that; what it waits for is told in `pace.py`.
        """
        if self.family.is_stream:
            count = self.layout.num_microbatches
            reduced = np.array([self.reductions])
            return float(least_period(*self._round(), reduced, self.stages, count)[0])
        ranks, in_halves = self.layout.num_ranks, self.family.in_halves
        forward, inputs, weights, again = (
            self.costs.per_stage(name, len(self.family.placement)) for name in TIMES
        )
        gradients = [i + a for i, a in zip(inputs, again, strict=True)]  # that others wait for
        later = list(weights)
        if not in_halves:
            gradients = [g + w for g, w in zip(gradients, weights, strict=True)]
            later = [0.0] * len(weights)
        urgent, rest, summed = [0.0] * ranks, [0.0] * ranks, [math.inf] * ranks
        for stage, rank in enumerate(self.family.placement):
            urgent[rank] += self.layout.num_microbatches * (forward[stage] + gradients[stage])
            rest[rank] += self.layout.num_microbatches * later[stage]
            summed[rank] = min(summed[rank], self.reductions[stage])
        come, go = ([0.0, *accumulate(row[: ranks - 1])] for row in (forward, gradients))
        return max(come[r] + urgent[r] + max(go[r], rest[r] + summed[r]) for r in range(ranks))

    def seconds(self, timeline: Timeline) -> float:
        """Until all is done, and the gradients of all replicas are summed."""
        ends = [0.0] * timeline.num_stages
        for row in timeline.spans:
            for action, _, end in row:
                ends[action.stage] = max(ends[action.stage], end)
        return max(end + more for end, more in zip(ends, self.reductions, strict=True))

    def pace(self) -> float:
        """Of a stream: seconds that every further micro-batch takes, at least."""
        return float(least_pace(*self._round(), self.stages)[0])

    def _round(self) -> tuple[Floats, Floats]:
        """Seconds that each stage works for a micro-batch, and sends for it; one row."""
        count = len(self.family.placement)
        work = np.sum([self.costs.per_stage(name, count) for name in TIMES], axis=0)
        return work[None], np.array([self.costs.per_stage("transfer", count)[:-1]])

    def mean_costs(self, micro_batches: float = 1.0) -> Costs:
        """The same for all stages; as if each held so many micro-batches where it holds one."""
        count = len(self.family.placement)
        means: dict[str, Any] = {
            name: sum(self.costs.per_stage(name, count)) / count for name in PER_STAGE
        }
        held = {name: micro_batches * means[name] for name in ("activation", "retained", "waiting")}
        return Costs(**means | held)

    def busiest(self) -> float:
        """Seconds that a micro-batch takes of the rank that has most to do."""
        loads = (self.costs.per_rank(name, self.family.placement) for name in TIMES)
        return max(map(sum, zip(*loads, strict=True)))


class Expected(NamedTuple):
    """What a way takes."""

    seconds: float  # of a step; of a stream, from one mini-batch to the next at its full pace
    work_ends: float  # seconds after which only gradients of other replicas are waited for
    bubble: float  # idle share of all ranks until then


class Ways:
    """Those of one task. State: what was worked out before, for ways that have it in common."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.family = cache(_family)
        self.short = cache(tried)
        self.measurement = cache(task.profile.at)
        self.machines = cache(self._machines)
        self.costs = cache(self._costs)
        self.even = cache(self._even)
        self.period = cache(self._period)

    def all(self, schedules: Sequence[str]) -> Iterator[Way]:
        yield from self._of_steps([name for name in schedules if family_of(name).is_synchronous])
        streams = [name for name in schedules if not family_of(name).is_synchronous]
        for layout, cut in dict.fromkeys(self._divided()) if streams else ():
            family = Family(cut.placement, in_halves=False, is_stream=True)
            yield from (self._way(layout, name, family, cut) for name in streams)

    def _of_steps(self, schedules: Sequence[str]) -> Iterator[Way]:
        for layout in layouts(self.task):
            for name, chunks in _orders(schedules, layout.num_ranks):
                family = self.family(name, layout.num_ranks, chunks)
                if len(self.task.profile.names) < len(family.placement):
                    continue
                balance = self.even(self.speeds(layout.grid), family.placement)
                cut = Cut(balance, family.placement, (False,) * len(balance))
                yield self._way(layout, name, family, cut)

    def _divided(self) -> Iterator[tuple[Layout, Cut]]:
        """For streams: one pipeline of all devices, stages with replicas or without.

        Micro-batches are as many as go round among the ranks of every stage.
        """
        task, num_ranks = self.task, self.task.cluster.num_devices
        if num_ranks == 1 or task.num_ranks not in (None, num_ranks):
            return

        def even(replicas: Replicas) -> tuple[int, ...]:
            grid = Grid(num_ranks, 1, side_by_side=False, stages=replicas)
            return self.even(self.speeds(grid), side_by_side(replicas))

        for samples in sample_sizes(task.batch_size):
            wanted = math.ceil(task.batch_size / samples)
            for replicas, balance in divisions(
                self.measurement(samples), task.cluster, wanted, even
            ):
                count = whole_turns(replicas, wanted)
                if count <= task.batch_size:
                    stages = replicas if max(replicas) > 1 else ()
                    grid = Grid(num_ranks, 1, side_by_side=False, stages=stages)
                    cut = Cut(balance, side_by_side(replicas), (False,) * len(balance))
                    yield Layout(grid, math.ceil(task.batch_size / count), count), cut

    def speeds(self, grid: Grid) -> tuple[float, ...]:
        """By rank; those of a stage with replicas are as fast as all of them together."""
        machines = self.machines(grid)
        counts = [len(row) if grid.stages else 1 for row in machines.numbers]
        return tuple(d.speed * n for d, n in zip(machines.devices, counts, strict=True))

    def expected(self, way: Way, schedule: Schedule) -> Expected:
        if not way.family.is_stream:
            timeline = simulate(schedule, way.costs)
            return Expected(way.seconds(timeline), timeline.makespan, timeline.step_bubble)
        count = way.layout.num_microbatches
        share = min(1.0, LONG / sum(map(len, schedule.actions)))
        seconds = self.as_if(way, max(few_microbatches(way), int(share * count)))
        work = count * sum(sum(way.costs.per_stage(name, schedule.num_stages)) for name in TIMES)
        idle = 1 - work / (schedule.num_ranks * seconds)
        return Expected(seconds, seconds, max(0.0, idle))  # rounding may make it less

    def as_if(self, way: Way, fewer: int) -> float:
        """Seconds of a stream's mini-batch, by one of fewer micro-batches: each of those that are
        lacking takes what ranks wait for in a circle.
        """
        turn = math.lcm(*way.stages)
        fewer = fewer // turn * turn
        lacking = way.layout.num_microbatches - fewer
        return self.period(way.stages, fewer, way.costs) + lacking * way.pace()

    def _period(self, stages: Replicas, num_microbatches: int, costs: Costs) -> float:
        """Of PipeDream's order, which is that of 2BW: versions of weights take no time."""
        schedule = self.short("pipedream", sum(stages), num_microbatches, 1, stages=stages)
        assert schedule is not None  # whole turns
        return period_of(simulate(schedule, costs), num_microbatches)

    def excesses(self, way: Way, schedule: Schedule) -> tuple[float, ...]:
        """By rank, bytes beyond what its devices have."""
        peaks = peak_memory(schedule.actions, schedule.placement, way.costs, schedule.replicas)
        return self._beyond(way, peaks)

    def excesses_by(self, way: Way, fewer: Schedule) -> tuple[float, ...]:
        """The same, by a schedule of fewer ranks: what these hold grows with their number."""
        scale = way.layout.num_ranks / fewer.num_ranks
        costs = way.mean_costs(scale)
        peaks = peak_memory(fewer.actions, fewer.placement, costs)
        ranks = range(way.layout.num_ranks)
        return self._beyond(way, [peaks[int(rank / scale)] for rank in ranks])

    def leaner(self, way: Way, schedule: Schedule, excesses: Sequence[float]) -> list[Way]:
        """Ways to come by with less, if that is too much."""
        return self.lighter(way, excesses) or self._tighter(way, schedule, excesses)

    def lighter(self, way: Way, excesses: Sequence[float]) -> list[Way]:
        """The same stages: forwards run again where that helps, or activations on the host."""
        cuts = []
        if self.task.cluster.host_bandwidth and way.cut.is_plain:
            cuts.append(replace(way.cut, offload=True))
        again = tuple(
            before or (self.task.recompute and excesses[rank] > 0)  # as on all ranks of a stage
            for rank, before in zip(way.family.placement, way.cut.recompute, strict=True)
        )
        if again != way.cut.recompute:
            cuts.append(replace(way.cut, recompute=again))
        return [self._way(way.layout, way.name, way.family, cut) for cut in cuts]

    def _tighter(self, way: Way, schedule: Schedule, excesses: Sequence[float]) -> list[Way]:
        """Other stages, that fit."""
        if way.cut.is_tight:
            return []
        if not way.family.is_stream and sum(excesses) > 0:  # no cut needs less on all together
            return []
        choices = (False, True) if self.task.recompute else (False,)
        cuts = [self._tight(way, schedule, recompute=choice) for choice in choices]
        return [self._way(way.layout, way.name, way.family, cut) for cut in cuts if cut]

    def _way(self, layout: Layout, name: str, family: Family, cut: Cut) -> Way:
        costs = self.costs(layout, cut, family.in_halves)
        summed = reductions(costs, cut.placement, self.machines(layout.grid))
        if family.is_stream:  # its steps wait for them, and not only the last
            costs = replace(costs, reduce=summed)
        return Way(layout, name, family, cut, costs, summed)

    def _beyond(self, way: Way, sizes: Sequence[float]) -> tuple[float, ...]:
        devices = self.machines(way.layout.grid).devices
        pairs = zip(sizes, devices, strict=True)
        return tuple(size - device.memory_bytes for size, device in pairs)

    def _machines(self, grid: Grid) -> Machines:
        ranks, replicas, are_neighbours, stages = grid
        if stages:
            return Machines.of_stages(self.task.cluster, stages)
        return Machines.of(self.task.cluster, ranks, replicas, side_by_side=are_neighbours)

    def _costs(self, layout: Layout, cut: Cut, in_halves: bool) -> Costs:
        return stage_costs(
            self.measurement(layout.samples),
            self.task.profile.tied,
            cut,
            self.machines(layout.grid),
            in_halves=in_halves,
            optimizer=self.task.optimizer,
        )

    def _even(self, speeds: tuple[float, ...], placement: Placement) -> tuple[int, ...]:
        """By the times of the largest micro-batch: how they compare hardly depends on its size."""
        times = [layer.time for layer in self.task.profile.measurements[-1].layers]
        return balance_for(times, placement, speeds)

    def _tight(self, way: Way, schedule: Schedule, *, recompute: bool) -> Cut | None:
        """As even as memory allows; None if it allows none."""
        placement, grid = way.family.placement, way.layout.grid
        measurement, machines = self.measurement(way.layout.samples), self.machines(grid)
        room = Room.of(measurement, schedule, machines, self.task.optimizer, recompute=recompute)
        times = [layer.time for layer in measurement.layers]
        try:
            balance = balance_for(times, placement, self.speeds(grid), room.fits)
        except PlanError:
            return None
        return Cut(balance, placement, (recompute,) * len(balance), is_tight=True)


def _orders(schedules: Sequence[str], num_ranks: int) -> Iterator[tuple[str, int]]:
    """Names, and how many stages a rank has. On one rank there is nothing to order."""
    if num_ranks == 1:
        yield "1f1b", 1
        return
    for name in schedules:
        family = family_of(name)
        if "chunks_per_rank" in family.options:
            yield from ((name, chunks) for chunks in CHUNKS)
        else:
            yield name, family.chunks


def few_microbatches(way: Way) -> int:
    """Those that show what every further one does: all ranks are full by then."""
    ranks, count = way.layout.num_ranks, way.layout.num_microbatches
    return min(count, 2 * (whole_turns(way.stages, ranks) if way.family.is_stream else ranks))


def _family(name: str, num_ranks: int, chunks: int) -> Family:
    """What two ranks show of it: stages straight on, in a loop or in waves, backwards in halves."""
    small = built(name, 2, 4, chunks)
    placed = loop if small.placement == loop(2, chunks) else wave
    in_halves = any(action.kind is Kind.I for row in small.actions for action in row)
    return Family(placed(num_ranks, chunks), in_halves)


def built(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    costs: Costs | None = None,
    stages: Replicas = (),
) -> Schedule:
    """Raises `ScheduleError` if there is none of these sizes."""
    family = family_of(name)
    sizes: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    if family.is_synchronous:
        given = chunks if "chunks_per_rank" in family.options else None
        return build_schedule(name, **sizes, chunks_per_rank=given, costs=costs)
    replicas = stages if stages and max(stages) > 1 else None
    until_full = math.ceil(num_ranks / num_microbatches)
    # and to see it repeat: the first of them may be shorter, and then two may take turns
    count = until_full + max(4, 2 * until_full + 1)
    return build_schedule(name, **sizes, replicas=replicas, num_minibatches=count)


def tried(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    costs: Costs | None = None,
    stages: Replicas = (),
) -> Schedule | None:
    """None if there is none: some need more micro-batches, or a multiple of the ranks."""
    try:
        return built(name, num_ranks, num_microbatches, chunks, costs, stages)
    except ScheduleError:
        return None
