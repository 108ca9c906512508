"""Search candidates best first, by lower bounds of their step times, until none can be faster.

    candidates ─► a bound ─► queue ─► the lowest ─┬─► simulate few micro-batches ─► a closer bound
                               ▲                  ├─► then simulate all of them ─► its time
                               └─── back in ◄─────┤   if it does not fit ─► smaller variants
                                                  └─► then it is a result: no other is faster

The first bound is a rank's work, and one micro-batch through all stages and back. After the short
simulation, each missing micro-batch adds what the busiest rank needs for it. Schedules without a
rule, whose order has to be searched for, come last, and only where they can still win.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stageline.costs import Costs
from stageline.planning.search.candidate import PlanCandidate
from stageline.planning.search.candidate_builder import CandidateBuilder
from stageline.planning.search.candidate_schedules import try_build_sized
from stageline.planning.search.enumerate_candidates import enumerate_candidates
from stageline.planning.search.memory_check import excess_bytes, excess_bytes_from_fewer_ranks
from stageline.planning.search.predict_time import StepTimePredictor, seconds_from_fewer_ranks
from stageline.planning.search.reduce_memory import recompute_or_offload, reduce_memory
from stageline.planning.search.search_result import EvaluatedCandidate
from stageline.planning.search.training_layouts import PlanRequest
from stageline.schedules.schedule import Schedule

SAME_MEMORY = {"zb_1p": "zb_h1", "zb_2p": "zb_h2", "zbv": "zbv"}  # a rule that holds as much
FOUND_BY_SEARCH = ("zb_1p", "zb_2p")  # schedules without a rule
MAX_SEARCHED_ACTIONS = 2_000  # of a schedule to search for; more take seconds
MAX_SCHEDULE_SEARCHES = 8
MAX_SHORT_RUN_ACTIONS = 30_000  # simulated for a closer bound
FEW_RANKS = 16  # simulated in place of all, if a short run of all would be too long
SHORT_RUN_MARGIN = 0.98  # of what a short run predicts: with uneven stages it may be 1 % too much
FEW_RANKS_ERROR = 0.05  # of what fewer ranks predict, with stages that differ by 10 %
MAX_ALTERNATIVES = 8  # other schedules to report
MAX_ALTERNATIVE_ACTIONS = 500_000  # simulated to find them
ASYNCHRONOUS_FACTOR = 50  # by which an asynchronous action takes longer to simulate
ReportProgress = Callable[[int, str], None]
T = TypeVar("T")


class BoundQueue(Generic[T]):
    """A priority queue. State: items, of which the one with the lowest bound is next."""

    def __init__(self) -> None:
        self.items: list[tuple[float, int, T]] = []
        self.num_added = 0  # breaks ties: the first one added wins

    def add(self, bound: float, item: T) -> None:
        heapq.heappush(self.items, (bound, self.num_added, item))
        self.num_added += 1

    def next(self, below: float = math.inf) -> tuple[float, T] | None:
        """Remove and return the next item, or None if there is none with such a bound."""
        if not self.items or self.items[0][0] >= below:
            return None
        bound, _, item = heapq.heappop(self.items)
        return bound, item


@dataclass(frozen=True)
class BoundedCandidate:
    """A candidate that has its closer bound, and fits as far as the short simulation shows."""

    candidate: PlanCandidate


class PlanSearch:
    """A best-first search.

    State: what is still to be looked at, all candidates so far, the best time so far, and the
    candidate that comes closest to fitting in memory.
    """

    def __init__(
        self, request: PlanRequest, schedules: Sequence[str], progress: ReportProgress
    ) -> None:
        self.builder, self.predictor = CandidateBuilder(request), StepTimePredictor()
        self.progress = progress
        self.queue: BoundQueue[PlanCandidate | BoundedCandidate | EvaluatedCandidate] = BoundQueue()
        self.to_search: BoundQueue[PlanCandidate] = BoundQueue()
        self.candidates: list[PlanCandidate] = []  # all so far, whether they fit or not
        self.num_tried = 0
        self.best_seconds = math.inf
        self.closest: tuple[float, PlanCandidate] | None = None  # to fitting, with its excess bytes
        candidates = enumerate_candidates(self.builder, schedules)
        for count, candidate in enumerate(candidates, start=1):
            progress(0, f"candidate {count}, cutting layers into stages")
            name, bound = candidate.schedule_name, candidate.lower_bound()
            is_searched = name in SAME_MEMORY and candidate.num_actions <= MAX_SEARCHED_ACTIONS
            if is_searched:
                self.to_search.add(bound, candidate)
            if name not in FOUND_BY_SEARCH:
                self.queue.add(bound, candidate)
            if is_searched or name not in FOUND_BY_SEARCH:
                self.candidates.append(candidate)

    def run(self) -> list[EvaluatedCandidate]:
        """Return the fastest candidate, then the best of other schedules that were soon found."""
        found = [*self._from_queue(), *self._from_schedule_searches()]
        return sorted(found, key=lambda each: each.seconds)

    def _from_queue(self) -> Iterator[EvaluatedCandidate]:
        actions_left, names = MAX_ALTERNATIVE_ACTIONS, set[str]()
        while actions_left > 0 and len(names) <= MAX_ALTERNATIVES and (entry := self.queue.next()):
            bound, item = entry
            candidate = item if isinstance(item, PlanCandidate) else item.candidate
            if candidate.schedule_name in names:
                continue
            if isinstance(item, EvaluatedCandidate):
                names.add(candidate.schedule_name)
                yield item
            elif isinstance(item, BoundedCandidate):
                factor = ASYNCHRONOUS_FACTOR if candidate.shape.is_asynchronous else 1
                actions_left -= factor * candidate.num_actions if names else 0
                self._simulate(candidate)
            else:
                self._tighten_bound(candidate, bound)

    def _from_schedule_searches(self) -> Iterator[EvaluatedCandidate]:
        searches_left = MAX_SCHEDULE_SEARCHES
        while searches_left and (entry := self.to_search.next(below=self.best_seconds)):
            candidate = entry[1]
            short = self.short_schedule(candidate, SAME_MEMORY[candidate.schedule_name])
            if short is None or not self._fits(candidate, short, self.to_search):
                continue
            searches_left -= 1
            self._report_progress()
            schedule = _whole_schedule(candidate, candidate.costs)
            if schedule is not None and max(self.excess(candidate, schedule)) <= 0:
                yield self._evaluate(candidate, schedule)

    def _tighten_bound(self, candidate: PlanCandidate, bound: float) -> None:
        """Put a candidate back with the bound of a short simulation, or variants that fit."""
        self._report_progress()
        share = candidate.num_short_run_microbatches / candidate.layout.num_microbatches
        is_long = candidate.num_actions * share > MAX_SHORT_RUN_ACTIONS
        if is_long and not candidate.shape.is_asynchronous:
            self._tighten_bound_by_fewer_ranks(candidate, bound)
            return
        short = self.short_schedule(candidate, candidate.schedule_name)
        if short is None or not self._fits(candidate, short, self.queue):
            return
        if short.num_microbatches == candidate.layout.num_microbatches:
            self._add_result(candidate, short)
            return
        closer = SHORT_RUN_MARGIN * self.predictor.predict_from_short_run(candidate, short).seconds
        self.queue.add(max(bound, closer), BoundedCandidate(candidate))

    def _tighten_bound_by_fewer_ranks(self, candidate: PlanCandidate, bound: float) -> None:
        """Simulate fewer ranks instead: memory and waits grow with their number."""
        layout = candidate.layout
        few = max(1, min(2 * FEW_RANKS, layout.num_microbatches * FEW_RANKS // layout.num_ranks))
        name, chunks = candidate.schedule_name, candidate.chunks
        schedule = self.predictor.schedule(name, FEW_RANKS, few, chunks)
        if schedule is None:
            self.queue.add(bound, BoundedCandidate(candidate))
            return
        tolerance = FEW_RANKS_ERROR * self.builder.request.cluster.device(0).memory_bytes
        devices = self.builder.devices(layout.grid)
        estimate = excess_bytes_from_fewer_ranks(candidate, schedule, devices)
        excess = [size - tolerance for size in estimate]
        variants = recompute_or_offload(self.builder, candidate, excess) if max(excess) > 0 else []
        self._add_variants(variants, self.queue)
        if not variants:
            closer = (1 - FEW_RANKS_ERROR) * seconds_from_fewer_ranks(candidate, schedule)
            self.queue.add(max(bound, closer), BoundedCandidate(candidate))

    def _simulate(self, candidate: PlanCandidate) -> None:
        schedule = _whole_schedule(candidate)
        if schedule is not None and self._fits(candidate, schedule, self.queue):
            self._add_result(candidate, schedule)

    def _add_result(self, candidate: PlanCandidate, schedule: Schedule) -> None:
        found = self._evaluate(candidate, schedule)
        self.queue.add(found.seconds, found)

    def _evaluate(self, candidate: PlanCandidate, schedule: Schedule) -> EvaluatedCandidate:
        prediction = self.predictor.predict(candidate, schedule)
        self.best_seconds = min(self.best_seconds, prediction.seconds)
        return EvaluatedCandidate(candidate, schedule, prediction)

    def _fits(self, candidate: PlanCandidate, schedule: Schedule, queue: BoundQueue[Any]) -> bool:
        """Return True if it fits; otherwise add variants that need less memory to the queue."""
        by_rank = self.excess(candidate, schedule)
        largest = max(by_rank)
        if largest <= 0:
            return True
        if self.closest is None or largest < self.closest[0]:
            self.closest = largest, candidate
        self._add_variants(reduce_memory(self.builder, candidate, schedule, by_rank), queue)
        return False

    def _add_variants(self, variants: Sequence[PlanCandidate], queue: BoundQueue[Any]) -> None:
        self.candidates.extend(variants)
        for variant in variants:
            queue.add(variant.lower_bound(), variant)

    def excess(self, candidate: PlanCandidate, schedule: Schedule) -> tuple[float, ...]:
        """Return for each rank the peak memory minus the memory of its device."""
        return excess_bytes(candidate, schedule, self.builder.devices(candidate.layout.grid))

    def short_schedule(self, candidate: PlanCandidate, name: str) -> Schedule | None:
        """Return a schedule with enough micro-batches to fill all ranks; None if there is none."""
        return self.predictor.schedule(
            name,
            candidate.layout.num_ranks,
            candidate.num_short_run_microbatches,
            candidate.chunks,
            stage_replicas=candidate.layout.grid.stage_replicas,
        )

    def _report_progress(self) -> None:
        best = self.best_seconds
        status = "none fits yet" if best == math.inf else f"best so far {1e3 * best:.4g} ms"
        self.num_tried += 1
        self.progress(self.num_tried, status)


def _whole_schedule(candidate: PlanCandidate, costs: Costs | None = None) -> Schedule | None:
    """Build the schedule with all ranks and micro-batches; costs are for one that is searched."""
    layout = candidate.layout
    return try_build_sized(
        candidate.schedule_name,
        layout.num_ranks,
        layout.num_microbatches,
        candidate.chunks,
        costs,
        layout.grid.stage_replicas,
    )
