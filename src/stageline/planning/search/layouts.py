"""How devices and samples can be divided, for a task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stageline.planning.cluster.cluster import Cluster
from stageline.planning.profiling.profile import Profile
from stageline.schedules.placement import Replicas


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
    stages: Replicas = ()  # ranks of each stage, if stages have replicas of their own


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


def layouts(task: Task) -> Iterator[Layout]:
    """All devices in use; micro-batches of a power of two samples, or all that a replica has."""
    for replicas in range(1, task.cluster.num_devices + 1):
        num_ranks, rest = divmod(task.cluster.num_devices, replicas)
        if rest or num_ranks > len(task.profile.names) or replicas > task.batch_size:
            continue
        if task.num_ranks not in (None, num_ranks):
            continue
        share = math.ceil(task.batch_size / replicas)
        is_a_choice = len(task.cluster.levels) > 1 and min(replicas, num_ranks) > 1
        for are_neighbours in (False, True) if is_a_choice else (False,):
            grid = Grid(num_ranks, replicas, are_neighbours)
            for samples in sample_sizes(share):
                yield Layout(grid, samples, math.ceil(share / samples))


def sample_sizes(share: int) -> list[int]:
    return sorted({2**power for power in range(share.bit_length()) if 2**power <= share} | {share})
