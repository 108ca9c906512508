"""Ways to train: how devices and samples are divided, in which order, and what each stage costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from stageline.costs import PER_STAGE, Costs
from stageline.errors import PlanError, ScheduleError
from stageline.planning.cluster import Cluster
from stageline.planning.placed import balance_for
from stageline.planning.profile import Profile
from stageline.planning.room import Room
from stageline.planning.stages import Cut, Machines, reductions, stage_costs
from stageline.report.memory import peak_memory
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.build import build_schedule, family_of, schedule_names
from stageline.schedules.placement import Placement, loop, wave
from stageline.schedules.schedule import Schedule

SCHEDULES = tuple(name for name in schedule_names(synchronous=True) if name != "naive")
TIMES = ("forward", "input_grad", "weight_grad", "recompute")
CHUNKS = (2, 4)  # stages that a rank has, where that can be chosen


@dataclass(frozen=True)
class Task:
    """What is planned for."""

    profile: Profile
    cluster: Cluster
    batch_size: int
    optimizer: str
    num_ranks: int | None  # None: as many as are best
    recompute: bool  # allowed


class Grid(NamedTuple):
    """How devices are divided."""

    num_ranks: int
    replicas: int
    side_by_side: bool  # the replicas of a rank are neighbours, not the ranks of a replica


class Layout(NamedTuple):
    """How devices and samples are divided."""

    grid: Grid
    samples: int  # of a micro-batch
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    @property
    def replicas(self) -> int:
        return self.grid.replicas


class Family(NamedTuple):
    """What is known of a schedule before it is built."""

    placement: Placement
    in_halves: bool


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
        return len(self.family.placement) // self.layout.num_ranks

    @property
    def num_actions(self) -> int:
        return 3 * len(self.family.placement) * self.layout.num_microbatches

    def bound(self) -> float:
        """Seconds below which no order is: a rank works, and waits for one micro-batch both ways.

        It comes through the forwards of the first stages of all ranks before it, and goes back
        through their backwards; with halves, weight gradients may fill the time in which it goes.
        Some stage's gradients are summed when all of its rank's work is done.
        """
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

    def all(self, schedules: Sequence[str]) -> Iterator[Way]:
        for layout in _layouts(self.task):
            for name, chunks in _orders(schedules, layout.num_ranks):
                family = self.family(name, layout.num_ranks, chunks)
                if len(self.task.profile.names) < len(family.placement):
                    continue
                balance = self.even(self.speeds(layout.grid), family.placement)
                cut = Cut(balance, family.placement, (False,) * len(balance))
                yield self._way(layout, name, family, cut)

    def speeds(self, grid: Grid) -> tuple[float, ...]:
        """By rank."""
        return tuple(device.speed for device in self.machines(grid).devices)

    def excesses(self, way: Way, schedule: Schedule) -> tuple[float, ...]:
        """By rank, bytes beyond what its devices have."""
        peaks = peak_memory(schedule.actions, schedule.placement, way.costs)
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
            before or (self.task.recompute and excesses[rank] > 0)
            for rank, before in zip(way.family.placement, way.cut.recompute, strict=True)
        )
        if again != way.cut.recompute:
            cuts.append(replace(way.cut, recompute=again))
        return [self._way(way.layout, way.name, way.family, cut) for cut in cuts]

    def _tighter(self, way: Way, schedule: Schedule, excesses: Sequence[float]) -> list[Way]:
        """Other stages, that fit."""
        if way.cut.is_tight or sum(excesses) > 0:  # no cut needs less on all ranks together
            return []
        choices = (False, True) if self.task.recompute else (False,)
        cuts = [self._tight(way, schedule, recompute=choice) for choice in choices]
        return [self._way(way.layout, way.name, way.family, cut) for cut in cuts if cut]

    def _way(self, layout: Layout, name: str, family: Family, cut: Cut) -> Way:
        costs = self.costs(layout, cut, family.in_halves)
        summed = reductions(costs, cut.placement, self.machines(layout.grid))
        return Way(layout, name, family, cut, costs, summed)

    def _beyond(self, way: Way, sizes: Sequence[float]) -> tuple[float, ...]:
        devices = self.machines(way.layout.grid).devices
        pairs = zip(sizes, devices, strict=True)
        return tuple(size - device.memory_bytes for size, device in pairs)

    def _machines(self, grid: Grid) -> Machines:
        ranks, replicas, side_by_side = grid
        return Machines.of(self.task.cluster, ranks, replicas, side_by_side=side_by_side)

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


def _layouts(task: Task) -> Iterator[Layout]:
    """All devices in use; micro-batches of a power of two samples, or all that a replica has."""
    for replicas in range(1, task.cluster.num_devices + 1):
        num_ranks, rest = divmod(task.cluster.num_devices, replicas)
        if rest or num_ranks > len(task.profile.names) or replicas > task.batch_size:
            continue
        if task.num_ranks not in (None, num_ranks):
            continue
        share = math.ceil(task.batch_size / replicas)
        sizes = {2**power for power in range(share.bit_length()) if 2**power <= share}
        is_a_choice = len(task.cluster.levels) > 1 and min(replicas, num_ranks) > 1
        for side_by_side in (False, True) if is_a_choice else (False,):
            grid = Grid(num_ranks, replicas, side_by_side)
            for samples in sorted(sizes | {share}):
                yield Layout(grid, samples, math.ceil(share / samples))


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


def _family(name: str, num_ranks: int, chunks: int) -> Family:
    """What two ranks show of it: stages straight on, in a loop or in waves, backwards in halves."""
    small = built(name, 2, 4, chunks)
    placed = loop if small.placement == loop(2, chunks) else wave
    in_halves = any(action.kind is Kind.I for row in small.actions for action in row)
    return Family(placed(num_ranks, chunks), in_halves)


def built(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, costs: Costs | None = None
) -> Schedule:
    """Raises `ScheduleError` if there is none of these sizes."""
    given = chunks if "chunks_per_rank" in family_of(name).options else None
    return build_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        chunks_per_rank=given,
        costs=costs,
    )


def tried(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, costs: Costs | None = None
) -> Schedule | None:
    """None if there is none: some need more micro-batches, or a multiple of the ranks."""
    try:
        return built(name, num_ranks, num_microbatches, chunks, costs)
    except ScheduleError:
        return None
