"""Assign the devices of a cluster to the ranks of a pipeline and its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.costs import Link
from stageline.planning.cluster.cluster import Cluster, Device
from stageline.schedules.placement import Replicas, side_by_side


@dataclass(frozen=True)
class RankDevices:
    """The devices of each rank over all replicas; the worst of them counts for planning.

    By default the ranks of a replica are neighbours. Links are those of the first replica. If
    stages have replicas, a rank counts as the worst of its stage, and so do links between stages.
    """

    cluster: Cluster
    devices: tuple[Device, ...]  # by rank, the least memory and speed of its devices
    numbers: tuple[range, ...]  # by rank, the numbers of its devices in the cluster, by replica
    by_stage: bool = False  # the numbers are those of all devices of the rank's stage

    @staticmethod
    def of_pipelines(
        cluster: Cluster, num_ranks: int, replicas: int, *, side_by_side: bool = False
    ) -> RankDevices:
        """Assign devices to replicas of a pipeline.

        With `side_by_side` the replicas of a rank are neighbours, not the ranks of a replica.
        """
        numbers = tuple(
            range(rank * replicas, (rank + 1) * replicas)
            if side_by_side
            else range(rank, num_ranks * replicas, num_ranks)
            for rank in range(num_ranks)
        )
        return RankDevices(cluster, _worst_devices(cluster, numbers), numbers)

    @staticmethod
    def of_stages(cluster: Cluster, replicas: Replicas) -> RankDevices:
        """Assign devices to one pipeline with this many neighbouring ranks for each stage."""
        firsts = side_by_side(replicas)
        numbers = tuple(
            range(first, first + count)
            for first, count in zip(firsts, replicas, strict=True)
            for _ in range(count)
        )
        return RankDevices(cluster, _worst_devices(cluster, numbers), numbers, by_stage=True)

    def link(self, source: int, target: int) -> Link:
        """Return the link between two ranks; of stages with replicas, the slowest between them."""
        sources, targets = self.numbers[source], self.numbers[target]
        if self.by_stage:
            ends = (sources[0], sources[-1], targets[0], targets[-1])
            return self.cluster.link(min(ends), max(ends))
        return self.cluster.link(sources[0], targets[0])

    def all_reduce_seconds(self, rank: int) -> tuple[float, float]:
        """Return the fixed time and the time per byte of a ring all-reduce over a rank's replicas.

        The slowest link counts. It joins the first and the last: no two are further apart.
        """
        numbers = self.numbers[rank]
        link, replicas = self.cluster.link(numbers[0], numbers[-1]), len(numbers)
        share = 2 * (replicas - 1) / replicas
        return link.latency * (replicas > 1), share / link.bandwidth


def _worst_devices(cluster: Cluster, numbers: Sequence[Sequence[int]]) -> tuple[Device, ...]:
    if not cluster.devices:  # all are the same
        return (cluster.device(0),) * len(numbers)
    return tuple(_worst([cluster.device(number) for number in row]) for row in numbers)


def _worst(devices: Sequence[Device]) -> Device:
    return Device(min(d.memory_bytes for d in devices), min(d.speed for d in devices))
