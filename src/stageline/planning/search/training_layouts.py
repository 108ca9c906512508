"""Enumerate how devices can be divided into ranks and replicas, and batches into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stageline.planning.cluster.cluster import Cluster
from stageline.planning.profiling.profile_result import Profile
from stageline.schedules.placement import Replicas


@dataclass(frozen=True)
class PlanRequest:
    """The model, the cluster and the settings that `sl.plan` searches a plan for."""

    profile: Profile
    cluster: Cluster
    batch_size: int
    optimizer: str
    num_ranks: int | None  # None: any number
    recompute: bool  # whether recomputation is allowed
    microbatch_size: int | None = None  # samples; None: any

    def sizes_to_try(self, samples: int) -> list[int]:
        """Return the micro-batch sizes to try for this many samples."""
        if self.microbatch_size is None:
            return sizes_to_try(samples)
        return [self.microbatch_size] if self.microbatch_size <= samples else []


class DeviceGrid(NamedTuple):
    """Devices divided into ranks and replicas."""

    num_ranks: int
    replicas: int
    side_by_side: bool  # the replicas of a rank are neighbours, not the ranks of a replica
    stage_replicas: Replicas = ()  # ranks of each stage, if single stages have replicas


class TrainingLayout(NamedTuple):
    """Devices divided into ranks and replicas, and a batch into micro-batches."""

    grid: DeviceGrid
    microbatch_size: int  # samples
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    @property
    def replicas(self) -> int:
        return self.grid.replicas


def training_layouts(request: PlanRequest) -> Iterator[TrainingLayout]:
    """Yield all layouts of synchronous pipelines that use all devices."""
    for replicas in range(1, request.cluster.num_devices + 1):
        num_ranks, rest = divmod(request.cluster.num_devices, replicas)
        if rest or num_ranks > len(request.profile.names) or replicas > request.batch_size:
            continue
        if request.num_ranks not in (None, num_ranks):
            continue
        samples = math.ceil(request.batch_size / replicas)
        order_matters = len(request.cluster.levels) > 1 and min(replicas, num_ranks) > 1
        for side_by_side in (False, True) if order_matters else (False,):
            grid = DeviceGrid(num_ranks, replicas, side_by_side)
            for size in request.sizes_to_try(samples):
                yield TrainingLayout(grid, size, math.ceil(samples / size))


def sizes_to_try(samples: int) -> list[int]:
    """Return the micro-batch sizes to try: powers of two, and all samples of a replica.

    >>> sizes_to_try(6)
    [1, 2, 4, 6]
    """
    powers = {2**power for power in range(samples.bit_length()) if 2**power <= samples}
    return sorted(powers | {samples})
