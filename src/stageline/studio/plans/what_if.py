"""Clusters with other devices, memory or links than those that were described."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

from stageline.errors import PlanError
from stageline.limits import MOST_DEVICES, check_most
from stageline.planning.cluster.cluster import Cluster, Device, Level


def with_memory(cluster: Cluster, memory: str) -> Cluster:
    """Return the cluster with this memory in each device."""
    if not cluster.devices:
        return replace(cluster, memory=memory)
    return replace(cluster, devices=tuple(Device(memory, each.speed) for each in cluster.devices))


def with_link_speed(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of all links multiplied; latencies stay."""
    if not cluster.levels:
        raise PlanError(
            f"the link speed is × {factor:g}, but the cluster has no levels of links, so that "
            "transfers are free: add levels to the cluster, or leave the link speed at × 1"
        )
    levels = (replace(level, bandwidth=level.bandwidth * factor) for level in cluster.levels)
    return replace(cluster, levels=tuple(levels))


def with_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the cluster with more or fewer devices, in machines of the same size.

    Devices that differ are repeated in their order.

    >>> pair = Cluster(8, "1GiB", levels=(Level("machine", 4, 1e9), Level("site", 2, 1e8)))
    >>> [level.size for level in with_devices(pair, 12).levels]
    [4, 3]
    >>> [level.size for level in with_devices(pair, 2).levels]
    [2, 1]
    """
    check_most("num_devices", num_devices, MOST_DEVICES, error=PlanError)
    devices = tuple(islice(cycle(cluster.devices), num_devices)) if cluster.devices else ()
    levels = _resized(cluster.levels, num_devices) if cluster.levels else ()
    return replace(cluster, num_devices=num_devices, devices=devices, levels=levels)


def _resized(levels: tuple[Level, ...], num_devices: int) -> tuple[Level, ...]:
    """Fill levels from the inside; the outermost takes as many groups as are left."""
    sizes, groups = [], num_devices
    for level in levels[:-1]:
        size = min(level.size, groups)
        if groups % size:
            raise PlanError(
                f"num_devices is {num_devices}, but the cluster's groups {level.name!r} have "
                f"{level.size} members: use a number that fills them, such as "
                f"{num_devices // groups * (groups - groups % size)}"
            )
        sizes.append(size)
        groups //= size
    return tuple(
        replace(level, size=size) for level, size in zip(levels, [*sizes, groups], strict=True)
    )
