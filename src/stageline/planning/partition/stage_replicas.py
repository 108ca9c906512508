"""Choose the number of ranks and of layers of each stage of an asynchronous pipeline.

    4 ranks    1 1 1 1    2 1 1    1 2 1    1 1 2    2 2    3 1    1 3

Up to `FEW_RANKS` ranks all of these are tried, each with the cuts whose lower bounds are best. With
more ranks, PipeDream's optimizer chooses both by its own cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from stageline.planning.cluster.cluster import Cluster
from stageline.planning.partition.memory_bound import crossing_bytes
from stageline.planning.partition.pipedream import pipedream_partition
from stageline.planning.partition.pipedream_graph import PipedreamGraph, PipedreamNode
from stageline.planning.partition.prefix_costs import Floats, Integers
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.profiling.profile_result import Measurement
from stageline.planning.stream_period import min_period
from stageline.schedules.placement import Replicas, side_by_side

FEW_RANKS = 8  # 127 ways to assign them to two stages or more
MAX_CUTS = 250  # tried for one micro-batch size
MAX_BOUNDS = 5_000  # cuts whose bounds are computed, in a few milliseconds
MAX_STATES = 10_000  # layers × ranks of PipeDream's optimizer; about half a second
UNLIMITED = 1e30  # bytes per second if transfers take no time: the optimizer needs a number

CutEvenly = Callable[[Replicas], tuple[int, ...]]


class ReplicatedCut(NamedTuple):
    """The number of ranks and of layers of each stage."""

    replicas: Replicas
    balance: tuple[int, ...]


def compositions(total: int) -> Iterator[Replicas]:
    """Yield all ways to assign ranks to stages in order.

    >>> list(compositions(3))
    [(1, 1, 1), (1, 2), (2, 1), (3,)]
    """
    if not total:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in compositions(total - first))


def pipelines(num_ranks: int, num_layers: int) -> list[Replicas]:
    """Return the ranks of each stage of all pipelines with at least two stages."""
    return [found for found in compositions(num_ranks) if 1 < len(found) <= num_layers]


def round_up_microbatches(replicas: Replicas, num_microbatches: int) -> int:
    """Return the next number of micro-batches that every stage can divide among its ranks.

    >>> round_up_microbatches((3, 2), 8)
    12
    """
    multiple = math.lcm(*replicas)
    return -(-num_microbatches // multiple) * multiple


def replicated_cuts(
    measurement: Measurement, cluster: Cluster, num_microbatches: int, cut_evenly: CutEvenly
) -> list[ReplicatedCut]:
    """Return the most promising cuts for all devices of a cluster, with and without replicas.

    `cut_evenly` cuts layers where there are too many cuts to compute their bounds.
    """
    num_ranks, num_layers = cluster.num_devices, len(measurement.layers)
    unreplicated = (1,) * num_ranks
    if num_ranks <= FEW_RANKS:
        tried = pipelines(num_ranks, num_layers)
    else:
        tried = [unreplicated] if num_ranks <= num_layers else []
    max_cuts = max(1, MAX_CUTS // max(1, len(tried)))
    found = []
    for replicas in tried:
        devices = RankDevices.of_stages(cluster, replicas)
        cuts = cuts_by_bound(measurement, devices, replicas, num_microbatches, max_cuts)
        found += [ReplicatedCut(replicas, balance) for balance in cuts or [cut_evenly(replicas)]]
    devices = RankDevices.of_stages(cluster, unreplicated)
    chosen = cut_by_pipedream(measurement, devices, num_microbatches)
    return [*found, chosen] if chosen else found


@cache
def all_boundaries(num_layers: int, num_stages: int) -> Integers:
    """Return a row for each cut: the positions between its stages, 0 and the last included."""
    rows = [(0, *cut, num_layers) for cut in combinations(range(1, num_layers), num_stages - 1)]
    return np.array(rows)


def cuts_by_bound(
    measurement: Measurement,
    devices: RankDevices,
    replicas: Replicas,
    num_microbatches: int,
    max_cuts: int,
) -> list[tuple[int, ...]]:
    """Return the balances with the lowest bounds, or none if there are too many to compare."""
    num_layers = len(measurement.layers)
    if math.comb(num_layers - 1, len(replicas) - 1) > MAX_BOUNDS:
        return []
    boundaries = all_boundaries(num_layers, len(replicas))
    bounds = _lower_bounds(measurement, devices, replicas, num_microbatches, boundaries)
    best = np.argsort(bounds, kind="stable")[:max_cuts]
    return [tuple(map(int, np.diff(boundaries[cut]))) for cut in best]


def _lower_bounds(
    measurement: Measurement,
    devices: RankDevices,
    replicas: Replicas,
    num_microbatches: int,
    boundaries: Integers,
) -> Floats:
    """Return a lower bound for the time per mini-batch of each cut."""
    layers, placement = measurement.layers, side_by_side(replicas)
    times = np.cumsum([0.0, *measurement.times_in_stage])
    gradients = np.cumsum([0.0, *(layer.parameters for layer in layers)])
    speeds = np.array([devices.devices[rank].speed for rank in placement])
    links = [devices.link(*pair) for pair in pairwise(placement)]
    latency, bandwidth = np.array([(link.latency, link.bandwidth) for link in links]).T
    fixed, per_byte = np.array([devices.all_reduce_seconds(rank) for rank in placement]).T
    return min_period(
        np.diff(times[boundaries], axis=1) / speeds,
        latency + np.array(crossing_bytes(measurement))[boundaries[:, 1:-1]] / bandwidth,
        fixed + np.diff(gradients[boundaries], axis=1) * per_byte,
        replicas,
        num_microbatches,
    )


def cut_by_pipedream(
    measurement: Measurement, devices: RankDevices, num_microbatches: int
) -> ReplicatedCut | None:
    """Return the cut of PipeDream's optimizer.

    Return None if it leaves ranks unused, has one stage, or would take too long. The optimizer's
    formula reduces gradients with every micro-batch, and twice as many bytes as a ring does, so
    parameters are divided by that.
    """
    num_ranks = len(devices.devices)
    if num_ranks * len(measurement.layers) > MAX_STATES:
        return None
    sent = crossing_bytes(measurement)[1:]
    nodes = [
        PipedreamNode(
            name=str(number),
            description="",
            forward=layer.forward,
            backward=layer.backward,
            activation=sent[number],
            parameters=layer.parameters / (2 * num_microbatches),
            reads=(str(number - 1),) if number else (),
        )
        for number, layer in enumerate(measurement.layers)
    ]
    bandwidth = min(UNLIMITED, devices.link(0, num_ranks - 1).bandwidth)
    found = pipedream_partition(PipedreamGraph(tuple(nodes), ()), num_ranks, bandwidth)
    if found.num_workers < num_ranks or len(found.stages) < 2:
        return None
    return ReplicatedCut(
        tuple(stage.replicas for stage in found.stages),
        tuple(stage.stop - stage.start for stage in found.stages),
    )
