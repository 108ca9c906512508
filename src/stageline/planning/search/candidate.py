"""A candidate of the search: a configuration, the costs of its stages, and its lower bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from stageline.costs import PER_STAGE, Costs
from stageline.planning.partition.prefix_costs import Floats
from stageline.planning.partition.stage_costs import StageCut
from stageline.planning.partition.stage_replicas import round_up_microbatches
from stageline.planning.search.training_layouts import TrainingLayout
from stageline.planning.stream_period import min_period
from stageline.schedules.placement import Placement, Replicas

TIMES = ("forward", "input_grad", "weight_grad", "recompute")


class ScheduleShape(NamedTuple):
    """The properties of a schedule that are known before it is built."""

    placement: Placement
    in_halves: bool  # backwards are I and W instead of B
    is_asynchronous: bool = False  # mini-batches follow each other without a flush


@dataclass(frozen=True)
class PlanCandidate:
    """A configuration for training; its costs follow from the rest."""

    layout: TrainingLayout
    schedule_name: str
    shape: ScheduleShape
    cut: StageCut
    costs: Costs
    reductions: tuple[float, ...]  # by stage, seconds of its all-reduce after its last backward
    host: float = 0.0  # seconds of a step before its first action and after its last

    @property
    def chunks(self) -> int:
        """The number of stages per rank."""
        return max(1, len(self.shape.placement) // self.layout.num_ranks)

    @property
    def stage_replicas(self) -> Replicas:
        """The number of ranks of each stage of an asynchronous schedule."""
        return self.layout.grid.stage_replicas or (1,) * self.layout.num_ranks

    @property
    def num_actions(self) -> int:
        """The approximate number of actions of its schedule."""
        return 3 * len(self.shape.placement) * self.layout.num_microbatches

    @property
    def num_short_run_microbatches(self) -> int:
        """Enough micro-batches to fill all ranks, so that every further one takes the same time."""
        fill = self.layout.num_ranks
        if self.shape.is_asynchronous:
            fill = round_up_microbatches(self.stage_replicas, fill)
        return min(self.layout.num_microbatches, 2 * fill)

    def lower_bound(self) -> float:
        """Return the seconds that a step takes at least, whatever the order of its actions."""
        if self.shape.is_asynchronous:
            return self._asynchronous_bound()
        return self._synchronous_bound()

    def _asynchronous_bound(self) -> float:
        """Return the bound that `stream_period.py` explains."""
        work, transfers = self.work_and_transfers()
        reductions, count = np.array([self.reductions]), self.layout.num_microbatches
        sizes = self.stage_replicas, count
        return float(min_period(work, transfers, reductions, *sizes, self.recomputation())[0])

    def _synchronous_bound(self) -> float:
        """Return the time of a rank's work, and of its wait for one micro-batch in each direction.

        The micro-batch arrives through the forwards of the first stages of all ranks before it, and
        returns through their backwards. With a backward in halves, weight gradients can fill the
        time of the return. Ranks recompute while the gradient is still on its way to them. The
        gradients of one of a rank's stages are reduced after all its work.
        """
        num_ranks = self.layout.num_ranks
        forward, input_grad, weight_grad, recompute = (
            self.costs.per_stage(name, len(self.shape.placement)) for name in TIMES
        )
        # the part of the backward that other ranks wait for, and the rest
        backward, deferred = list(input_grad), list(weight_grad)
        if not self.shape.in_halves:
            backward = [b + w for b, w in zip(backward, weight_grad, strict=True)]
            deferred = [0.0] * len(weight_grad)
        urgent, rest, reduction = [0.0] * num_ranks, [0.0] * num_ranks, [math.inf] * num_ranks
        for stage, rank in enumerate(self.shape.placement):
            work = forward[stage] + recompute[stage] + backward[stage]
            urgent[rank] += self.layout.num_microbatches * work
            rest[rank] += self.layout.num_microbatches * deferred[stage]
            reduction[rank] = min(reduction[rank], self.reductions[stage])
        arrive, back = ([0.0, *accumulate(row[: num_ranks - 1])] for row in (forward, backward))
        return max(
            arrive[rank] + urgent[rank] + max(back[rank], rest[rank] + reduction[rank])
            for rank in range(num_ranks)
        )

    def work_and_transfers(self) -> tuple[Floats, Floats]:
        """Return the seconds of work and of sending per micro-batch by stage, as one row each."""
        num_stages = len(self.shape.placement)
        work = np.sum([self.costs.per_stage(name, num_stages) for name in TIMES], axis=0)
        return work[None], np.array([self.costs.per_stage("transfer", num_stages)[:-1]])

    def recomputation(self) -> Floats:
        """Return the seconds of recomputation per micro-batch by stage, as one row."""
        return np.array([self.costs.per_stage("recompute", len(self.shape.placement))])

    def mean_costs(self, memory_scale: float = 1.0) -> Costs:
        """Return the mean costs of all stages, with the memory of micro-batches scaled."""
        num_stages = len(self.shape.placement)
        means: dict[str, Any] = {
            name: sum(self.costs.per_stage(name, num_stages)) / num_stages for name in PER_STAGE
        }
        memory = {
            name: memory_scale * means[name] for name in ("activation", "retained", "waiting")
        }
        return Costs(**means | memory)

    def busiest_rank_seconds(self) -> float:
        """Return the seconds per micro-batch of the rank that has the most work."""
        loads = (self.costs.per_rank(name, self.shape.placement) for name in TIMES)
        return max(map(sum, zip(*loads, strict=True)))
