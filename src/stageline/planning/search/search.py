"""sl.plan: look at ways to train from the most promising on, until no other can be faster.

    ways ─► a bound ─► queue ─► the lowest ─┬─► run it for few micro-batches ─► a closer bound
                         ▲                  ├─► run it for all, if that is done ─► its time
                         └─── back in ◄─────┤   if it does not fit ─► leaner ways and their bounds
                                            └─► found, if that is done too: no other is faster

No rank is faster than its work, one micro-batch through all stages, and the same back. After a run
for few micro-batches each of those that are lacking takes what the busiest rank needs for it.
Orders that are searched for come last, and only where they can still win.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from stageline.arguments import check_arguments, check_size
from stageline.costs import Costs
from stageline.errors import PlanError
from stageline.limits import MOST_SAMPLES, check_most
from stageline.planning.cluster.cluster import Cluster
from stageline.planning.partition.stages import states_of
from stageline.planning.plan import Plan
from stageline.planning.profiling.profile import Profile
from stageline.planning.search.layouts import Task
from stageline.planning.search.outcome import Found, others, stages_in_words, why_nothing_fits
from stageline.planning.search.ways import SCHEDULES, TIMES, Way, Ways, few_microbatches, tried
from stageline.schedules.build import family_of
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

STAND_IN = {"zb_1p": "zb_h1", "zb_2p": "zb_h2", "zbv": "zbv"}  # which hold as much as these
FOUND_BY_SEARCH = ("zb_1p", "zb_2p")  # for want of a rule
MANY_ACTIONS = 2_000  # of a schedule that is searched for; beyond that it takes seconds
NUM_SEARCHES = 8
SHORT = 30_000  # actions that are simulated for a closer bound, at most
FEW_RANKS = 16  # that show what more do, if there are too many for a short run
SURE = 0.98  # of what a short run says: where stages are uneven it may say 1 % too much
NEAR = 0.05  # by which what fewer ranks say may be wrong, with stages that differ by 10 %
NUM_OTHERS = 8  # schedules that a plan tells of beside its own
PATIENCE = 500_000  # actions that are simulated for their sake
DEAR = 50  # times as much takes one of a stream, whose messages and steps are written out
Progress = Callable[[int, str], None]
T = TypeVar("T")


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
    that already; without `recompute` nothing is run again. Asynchronous schedules, which train with
    other numbers, and with them replicas of single stages are looked at only if they are named.
    `progress` is called with how many ways were looked at, and the best so far.
    """
    check_size("batch_size", batch_size)
    check_most("batch_size", batch_size, MOST_SAMPLES, error=PlanError)
    if num_ranks is not None:
        check_size("num_ranks", num_ranks)
    check_arguments(plan, locals(), PlanError)
    states_of(optimizer)
    for name in schedules:
        family_of(name)  # raises if there is none
    task = Task(profile, cluster, batch_size, optimizer, num_ranks, recompute)
    search = Search(task, schedules, progress or (lambda _, __: None))
    found = search.run()
    if not found:
        raise PlanError(why_nothing_fits(task, search.nearest, _advice(task, schedules)))
    return found[0].plan(task, others(found))


class Queue(Generic[T]):
    """State: items, of which the one with the lowest bound is next."""

    def __init__(self) -> None:
        self.items: list[tuple[float, int, T]] = []
        self.count = 0  # of all that were ever put: ties go to the first

    def put(self, bound: float, item: T) -> None:
        heapq.heappush(self.items, (bound, self.count, item))
        self.count += 1

    def next(self, below: float = math.inf) -> tuple[float, T] | None:
        if not self.items or self.items[0][0] >= below:
            return None
        bound, _, item = heapq.heappop(self.items)
        return bound, item


@dataclass(frozen=True)
class Known:
    """A way of which a short run has shown what it takes, and that it fits so far."""

    way: Way


class Search:
    """State: what is still to be looked at, the best so far, and what comes nearest to fitting."""

    def __init__(self, task: Task, schedules: Sequence[str], progress: Progress) -> None:
        self.ways, self.progress = Ways(task), progress
        self.queue: Queue[Way | Known | Found] = Queue()
        self.to_search: Queue[Way] = Queue()
        self.looked_at = 0
        self.best = math.inf
        self.nearest: tuple[float, Way] | None = None
        for count, way in enumerate(self.ways.all(schedules), start=1):
            progress(0, f"{count} ways so far, cutting layers into stages")
            if way.name in STAND_IN and way.num_actions <= MANY_ACTIONS:
                self.to_search.put(way.bound(), way)
            if way.name not in FOUND_BY_SEARCH:
                self.queue.put(way.bound(), way)

    def run(self) -> list[Found]:
        """The fastest first, and the fastest of other schedules if they are soon found."""
        found = [*self._from_queue(), *self._from_searches()]
        return sorted(found, key=lambda each: each.seconds)

    def _from_queue(self) -> Iterator[Found]:
        patience, names = PATIENCE, set[str]()
        while patience > 0 and len(names) <= NUM_OTHERS and (entry := self.queue.next()):
            bound, item = entry
            way = item if isinstance(item, Way) else item.way
            if way.name in names:
                continue
            if isinstance(item, Found):
                names.add(way.name)
                yield item
            elif isinstance(item, Known):
                dear = DEAR if way.family.is_stream else 1
                patience -= dear * way.num_actions if names else 0
                self._simulate(way)
            else:
                self._look_at(way, bound)

    def _from_searches(self) -> Iterator[Found]:
        left = NUM_SEARCHES
        while left and (entry := self.to_search.next(below=self.best)):
            way = entry[1]
            short = self._short(way, STAND_IN[way.name])
            if short is None or not self._fits(way, short, self.to_search):
                continue
            left -= 1
            self._tell()
            schedule = _whole(way, way.costs)
            if schedule is not None and max(self.ways.excesses(way, schedule)) <= 0:
                found = Found(way, schedule, self.ways.expected(way, schedule))
                self.best = min(self.best, found.seconds)
                yield found

    def _look_at(self, way: Way, bound: float) -> None:
        self._tell()
        is_long = way.num_actions * few_microbatches(way) / way.layout.num_microbatches > SHORT
        if is_long and not way.family.is_stream:
            self._look_at_fewer_ranks(way, bound)
            return
        short = self._short(way, way.name)
        if short is None or not self._fits(way, short, self.queue):
            return
        if short.num_microbatches == way.layout.num_microbatches:
            self._found(way, short)
        elif way.family.is_stream:
            closer = self.ways.as_if(way, short.num_microbatches)
            self.queue.put(max(bound, SURE * closer), Known(way))
        else:
            lacking = way.layout.num_microbatches - short.num_microbatches
            closer = way.seconds(simulate(short, way.costs)) + lacking * way.busiest()
            self.queue.put(max(bound, SURE * closer), Known(way))

    def _look_at_fewer_ranks(self, way: Way, bound: float) -> None:
        """What ranks hold, and what they wait for, grows with their number."""
        ranks, count = way.layout.num_ranks, way.layout.num_microbatches
        few = max(1, min(2 * FEW_RANKS, count * FEW_RANKS // ranks))
        schedule = self.ways.short(way.name, FEW_RANKS, few, way.chunks)
        if schedule is None:
            self.queue.put(bound, Known(way))
            return
        spare = NEAR * self.ways.task.cluster.device(0).memory_bytes
        excesses = [excess - spare for excess in self.ways.excesses_by(way, schedule)]
        lighter = self.ways.lighter(way, excesses) if max(excesses) > 0 else []
        for each in lighter:
            self.queue.put(each.bound(), each)
        if not lighter:
            self.queue.put(max(bound, (1 - NEAR) * scaled_up(way, schedule)), Known(way))

    def _simulate(self, way: Way) -> None:
        schedule = _whole(way)
        if schedule is not None and self._fits(way, schedule, self.queue):
            self._found(way, schedule)

    def _found(self, way: Way, schedule: Schedule) -> None:
        found = Found(way, schedule, self.ways.expected(way, schedule))
        self.best = min(self.best, found.seconds)
        self.queue.put(found.seconds, found)

    def _fits(self, way: Way, schedule: Schedule, queue: Queue[Any]) -> bool:
        """If not, leaner ways take its place in the queue."""
        excesses = self.ways.excesses(way, schedule)
        excess = max(excesses)
        if excess <= 0:
            return True
        if self.nearest is None or excess < self.nearest[0]:
            self.nearest = excess, way
        for leaner in self.ways.leaner(way, schedule, excesses):
            queue.put(leaner.bound(), leaner)
        return False

    def _short(self, way: Way, name: str) -> Schedule | None:
        stages = way.layout.grid.stages
        few = few_microbatches(way)
        return self.ways.short(name, way.layout.num_ranks, few, way.chunks, stages=stages)

    def _tell(self) -> None:
        told = "none fits yet" if self.best == math.inf else f"best so far {1e3 * self.best:.4g} ms"
        self.looked_at += 1
        self.progress(self.looked_at, told)


def scaled_up(way: Way, fewer: Schedule) -> float:
    """Seconds, by a schedule of fewer ranks that have as much to do: more of them wait longer."""
    costs = way.mean_costs()
    load = sum(costs.per_rank(name, fewer.placement)[0] for name in TIMES)
    waits = simulate(fewer, costs).makespan - fewer.num_microbatches * load
    more = (way.layout.num_ranks - 1) / (fewer.num_ranks - 1)
    return way.layout.num_microbatches * way.busiest() + more * waits + min(way.reductions)


def _whole(way: Way, costs: Costs | None = None) -> Schedule | None:
    """With all ranks and micro-batches; with costs if it is searched for."""
    (ranks, _, _, stages), _, count = way.layout
    return tried(way.name, ranks, count, way.chunks, costs, stages)


def _advice(task: Task, schedules: Sequence[str]) -> str:
    """What would make it fit."""
    if task.recompute:
        return ""
    allowed = Search(replace(task, recompute=True), schedules, lambda _, __: None).run()
    return f"recompute on {stages_in_words(allowed[0].way.cut.recompute)}, or " if allowed else ""
