"""sl.plan: try ways to train from the most promising on, until no other can be faster.

layouts (ranks × replicas) × micro-batch sizes × schedules
  ─► bound: no rank can be faster than an even share of the work, one micro-batch through
     all stages, and the same back
  ─► cut, simulate, recompute where memory is short ─► the fastest that fits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from stageline.arguments import check_size
from stageline.costs import Costs
from stageline.errors import PlanError, ScheduleError
from stageline.planning.cluster import Cluster
from stageline.planning.partition import split
from stageline.planning.placed import split_placed
from stageline.planning.plan import Option, Plan, costs_as_numbers
from stageline.planning.profile import Profile
from stageline.planning.stages import Cut, Machines, stage_costs, states_of
from stageline.report.memory import peak_memory
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.build import FAMILIES, build_schedule
from stageline.schedules.placement import Placement, loop, wave
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate
from stageline.units import format_bytes

SCHEDULES = tuple(name for name in FAMILIES if name != "naive")
SEARCHED = ("zb_1p", "zb_2p", "zbv")  # for the costs of the stages
NUM_OTHERS = 8  # that a plan tells of
MANY_ACTIONS = 2_000  # of a schedule that is searched for; beyond that it takes seconds
Progress = Callable[[int, str], None]


class Layout(NamedTuple):
    """How devices and samples are divided."""

    num_ranks: int
    replicas: int
    samples: int  # of a micro-batch
    num_microbatches: int

    def machines(self, cluster: Cluster) -> Machines:
        return Machines.of(cluster, self.num_ranks, self.replicas)


class Family(NamedTuple):
    """What is known of a schedule before it is built."""

    placement: Placement
    in_halves: bool


@dataclass(frozen=True)
class Candidate:
    """A way to train, not simulated yet."""

    layout: Layout
    name: str
    cut: Cut
    family: Family
    bound: float  # seconds


@dataclass(frozen=True)
class Task:
    """What is planned for."""

    profile: Profile
    cluster: Cluster
    batch_size: int
    optimizer: str
    num_ranks: int | None  # None: as many as are best
    recompute: bool  # allowed


@dataclass(frozen=True)
class Trial:
    """A way to train, and what its ranks hold beyond what they have."""

    layout: Layout
    schedule: Schedule
    cut: Cut
    costs: Costs
    excesses: tuple[float, ...]  # bytes, by rank

    @property
    def excess(self) -> float:
        return max(self.excesses)

    def option(self, **expected: Any) -> Option:
        return Option(
            schedule=self.schedule.name,
            num_ranks=self.layout.num_ranks,
            replicas=self.layout.replicas,
            num_microbatches=self.layout.num_microbatches,
            samples=self.layout.samples,
            recompute=sum(self.cut.recompute),
            peak_memory=max(_peaks(self.schedule, self.costs)),
            **expected,
        )


@dataclass(frozen=True)
class Found:
    """One that fits, simulated."""

    trial: Trial
    timeline: Timeline
    seconds: float

    def option(self, verdict: str = "") -> Option:
        return self.trial.option(
            seconds=self.seconds, bubble=self.timeline.step_bubble, verdict=verdict
        )


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    optimizer: str = "adamw",
    num_ranks: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    recompute: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """The fastest way to train with batches of this size that fits in the devices' memory.

    Ranks, replicas, cut, schedule, size of micro-batches and recomputation are chosen; the plan
    tells what is expected, and why others lost. `num_ranks` and `schedules` are for those who know
    that already; without `recompute` nothing is run again.
    `progress` is called with how many ways were tried, and the best so far.
    """
    check_size("batch_size", batch_size)
    states_of(optimizer)
    task = Task(profile, cluster, batch_size, optimizer, num_ranks, recompute)
    found, nearest = _tried(task, schedules, progress or (lambda _, __: None))
    if not found:
        raise PlanError(_nothing_fits(task, nearest))
    found.sort(key=lambda each: each.seconds)
    best = found[0].trial
    return Plan(
        layers=profile.names,
        balance=best.cut.balance,
        recompute=best.cut.recompute,
        actions=tuple(" ".join(map(str, row)) for row in best.schedule.actions),
        costs=costs_as_numbers(best.costs, best.schedule.num_stages),
        peak_memory=_peaks(best.schedule, best.costs),
        batch_size=batch_size,
        chosen=found[0].option(),
        others=tuple(_others(found)),
    )


def _tried(
    task: Task, schedules: Sequence[str], progress: Progress
) -> tuple[list[Found], Trial | None]:
    """Those that fit, and of those that do not the one that comes nearest."""
    found: list[Found] = []
    nearest: Trial | None = None
    best = math.inf
    candidates = sorted(_candidates(task, schedules), key=lambda each: each.bound)
    for count, candidate in enumerate(candidates, start=1):
        if candidate.bound >= best:
            break
        told = f"best so far {1e3 * best:.4g} ms" if found else "none fits yet"
        progress(count, f"{told}, {len(candidates)} ways at most")
        trial = _trial(task, candidate)
        if trial is None:
            continue
        if trial.excess > 0:
            nearest = min((t for t in (nearest, trial) if t), key=lambda each: each.excess)
        elif _bound(candidate.layout, trial.costs, candidate.family) < best:
            found.append(_simulated(task, trial))
            best = min(best, found[-1].seconds)
    return found, nearest


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
        for samples in sorted(sizes | {share}):
            yield Layout(num_ranks, replicas, samples, math.ceil(share / samples))


def _candidates(task: Task, schedules: Sequence[str]) -> Iterator[Candidate]:
    family_of = cache(_family)
    balance_of = cache(lambda machines, placement: _balance(task, machines, placement))
    for layout in _layouts(task):
        machines = layout.machines(task.cluster)
        costs_of = cache(lambda *key: _costs(task, layout, *key))  # noqa: B023  used up here
        for name in schedules:
            family = family_of(name, layout.num_ranks)
            if len(task.profile.names) < len(family.placement):
                continue
            if _is_too_much(name, layout, family):
                continue
            balance = balance_of(machines, family.placement)
            cut = Cut(balance, family.placement, (False,) * len(balance))
            costs = costs_of(cut, family.in_halves)
            if max(_beyond(costs.static(family.placement), machines)) <= 0:
                yield Candidate(layout, name, cut, family, _bound(layout, costs, family))


def _costs(task: Task, layout: Layout, cut: Cut, in_halves: bool) -> Costs:
    return stage_costs(
        task.profile.at(layout.samples),
        task.profile.tied,
        cut,
        layout.machines(task.cluster),
        in_halves=in_halves,
        optimizer=task.optimizer,
    )


def _family(name: str, num_ranks: int) -> Family:
    """What two ranks show of it: stages straight on, in a loop or in waves, backwards in halves."""
    small = build_schedule(name, num_ranks=2, num_microbatches=4)
    chunks = small.num_stages // 2
    placed = loop if small.placement == loop(2, chunks) else wave
    in_halves = any(action.kind is Kind.I for row in small.actions for action in row)
    return Family(placed(num_ranks, chunks), in_halves)


def _is_too_much(name: str, layout: Layout, family: Family) -> bool:
    """Schedules that are always searched for; and all but one where there is nothing to order."""
    if layout.num_ranks == 1:
        return name != "1f1b"
    num_actions = 3 * len(family.placement) * layout.num_microbatches
    return name in ("zb_1p", "zb_2p") and num_actions > MANY_ACTIONS


def _bound(layout: Layout, costs: Costs, family: Family) -> float:
    """Seconds below which no order is: a rank works, and waits for one micro-batch to come and go.

    It comes through the forwards of the first stages of all ranks before it, and goes back through
    their backwards; with halves, weight gradients may fill the time in which it goes.
    """
    stages, ranks = len(family.placement), layout.num_ranks
    names = ("forward", "input_grad", "weight_grad")
    forward, inputs, weights = (costs.per_stage(name, stages) for name in names)
    work, chain = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(family.placement):
        chain[rank] += layout.num_microbatches * (forward[stage] + inputs[stage])
        work[rank] += layout.num_microbatches * weights[stage]
    come = [0.0, *accumulate(forward[: ranks - 1])]
    back = inputs if family.in_halves else [i + w for i, w in zip(inputs, weights, strict=True)]
    go = [0.0, *accumulate(back[: ranks - 1])]
    if not family.in_halves:
        return max(chain[r] + work[r] + come[r] + go[r] for r in range(ranks))
    return max(max(chain[r] + go[r], chain[r] + work[r]) + come[r] for r in range(ranks))


def _trial(task: Task, candidate: Candidate) -> Trial | None:
    """With as much recomputation as it needs; None if there is no such schedule."""
    layout = candidate.layout
    sizes = {"num_ranks": layout.num_ranks, "num_microbatches": layout.num_microbatches}
    family, machines = candidate.family, layout.machines(task.cluster)
    costs = _costs(task, layout, candidate.cut, family.in_halves)
    num_actions = 3 * len(family.placement) * layout.num_microbatches
    is_searched = candidate.name in SEARCHED and num_actions <= MANY_ACTIONS
    try:
        schedule = build_schedule(candidate.name, **sizes, costs=costs if is_searched else None)
    except ScheduleError:
        return None
    excesses = _beyond(_peaks(schedule, costs), machines)
    trial = Trial(layout, schedule, candidate.cut, costs, excesses)
    if trial.excess <= 0 or not task.recompute:
        return trial
    again = tuple(trial.excesses[rank] > 0 for rank in family.placement)
    cut = replace(candidate.cut, recompute=again)
    costs = _costs(task, layout, cut, family.in_halves)
    return Trial(layout, schedule, cut, costs, _beyond(_peaks(schedule, costs), machines))


def _simulated(task: Task, trial: Trial) -> Found:
    timeline = simulate(trial.schedule, trial.costs)
    reduced = _reduced(task, trial.layout, trial.costs, timeline)
    return Found(trial, timeline, max(timeline.makespan, reduced))


def _reduced(task: Task, layout: Layout, costs: Costs, timeline: Timeline) -> float:
    """When gradients of all replicas are summed: each stage's right behind its last backward."""
    if layout.replicas == 1:
        return 0.0
    gradients = costs.per_stage("gradients", timeline.num_stages)
    ends = [0.0] * timeline.num_stages
    for row in timeline.spans:
        for action, _, end in row:
            ends[action.stage] = max(ends[action.stage], end)
    share = 2 * (layout.replicas - 1) / layout.replicas  # of the bytes, in a ring
    times = []
    for stage, rank in enumerate(timeline.placement):
        link = task.cluster.link(rank, rank + layout.num_ranks)
        times.append(ends[stage] + link.latency + share * gradients[stage] / link.bandwidth)
    return max(times)


def _balance(task: Task, machines: Machines, placement: Placement) -> tuple[int, ...]:
    """By the times of the largest measured micro-batch: how they compare hardly depends on it."""
    measurement = task.profile.measurements[-1]
    costs = [la.forward + la.input_grad + la.weight_grad for la in measurement.layers]
    speeds = [device.speed for device in machines.devices]
    if len(placement) == len(speeds):
        return split(costs, len(speeds), speeds=speeds)
    return split_placed(costs, placement, speeds=speeds).balance


def _peaks(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    return peak_memory(schedule.actions, schedule.placement, costs)


def _beyond(sizes: Sequence[float], machines: Machines) -> tuple[float, ...]:
    """By rank, bytes beyond what its devices have."""
    pairs = zip(sizes, machines.devices, strict=True)
    return tuple(size - device.memory_bytes for size, device in pairs)


def _others(found: Sequence[Found]) -> Iterator[Option]:
    """The next best, one of each schedule, and by how much they are slower."""
    best = found[0]
    seen = {best.trial.schedule.name}
    for each in found[1:]:
        name = each.trial.schedule.name
        if name not in seen and len(seen) <= NUM_OTHERS:
            seen.add(name)
            slower = each.seconds / best.seconds - 1
            yield each.option(f"{100 * slower:.1f} % slower: {_why(each, best)}")


def _why(loser: Found, best: Found) -> str:
    if sum(loser.trial.cut.recompute) > sum(best.trial.cut.recompute):
        return "needs more recomputation to fit"
    if loser.timeline.step_bubble > best.timeline.step_bubble:
        return "a larger bubble"
    if loser.trial.layout != best.trial.layout:
        return "slower micro-batches"
    return "its forwards and backwards take longer"


def _nothing_fits(task: Task, nearest: Trial | None) -> str:
    """What comes nearest, and what would make it fit."""
    devices, memory = task.cluster.num_devices, task.cluster.device(0).memory_bytes
    if nearest is None:
        return (
            f"nothing fits: with batches of {task.batch_size} on {devices} devices of "
            f"{format_bytes(memory)} there is no cut of {len(task.profile.names)} layers whose "
            "parameters, gradients and optimizer state do: use more or larger devices"
        )
    option = nearest.option(seconds=0.0, bubble=0.0)
    again = "" if task.recompute else "recompute=True, or "
    return (
        f"nothing fits in {format_bytes(memory)}; nearest comes {option.words}, whose fullest rank "
        f"needs {format_bytes(option.peak_memory)}: use {again}devices with that much, or more "
        "of them"
    )
