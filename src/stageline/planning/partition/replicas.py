"""Which stages get how many ranks, and where layers are cut for that.

    4 ranks    1 1 1 1    2 1 1    1 2 1    1 1 2    2 2    3 1    1 3

Up to `FEW_RANKS` ranks all of these are tried; of the cuts for each, those that by their bound are
the fastest. Beyond that PipeDream's optimizer chooses both, by its own costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from stageline.planning.cluster.cluster import Cluster
from stageline.planning.partition.chain import Floats, Whole
from stageline.planning.partition.pipedream import partition
from stageline.planning.partition.pipedream_graph import Graph, Node
from stageline.planning.partition.room import passing_bytes
from stageline.planning.partition.stages import Machines
from stageline.planning.profiling.profile import Measurement
from stageline.planning.search.pace import least_period
from stageline.schedules.placement import Replicas, side_by_side

FEW_RANKS = 8  # 127 ways to give them to two stages or more
FEW_CUTS = 250  # that are tried for one size of micro-batches
MANY_CUTS = 5_000  # of which the bounds are worked out, in a few milliseconds
MANY_STATES = 10_000  # layers × ranks of PipeDream's optimizer; about half a second
FREE = 1e30  # bytes a second, where transfers cost nothing: its optimizer needs a number


EvenCut = Callable[[Replicas], tuple[int, ...]]


class Division(NamedTuple):
    """Ranks and layers of each stage."""

    replicas: Replicas
    balance: tuple[int, ...]


def compositions(total: int) -> Iterator[Replicas]:
    """All ways to give ranks to stages, in order.

    >>> list(compositions(3))
    [(1, 1, 1), (1, 2), (2, 1), (3,)]
    """
    if not total:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in compositions(total - first))


def pipelines(num_ranks: int, num_layers: int) -> list[Replicas]:
    """Of two stages or more, each with a layer at least."""
    return [found for found in compositions(num_ranks) if 1 < len(found) <= num_layers]


def whole_turns(replicas: Replicas, num_microbatches: int) -> int:
    """So many micro-batches or a few more, that go round among the ranks of every stage.

    >>> whole_turns((3, 2), 8)
    12
    """
    turn = math.lcm(*replicas)
    return -(-num_microbatches // turn) * turn


def divisions(
    measurement: Measurement, cluster: Cluster, num_microbatches: int, even: EvenCut
) -> list[Division]:
    """Those that promise most, without replicas and with them, for all devices of a cluster.

    `even` cuts layers where there are too many cuts to look at.
    """
    num_ranks, num_layers = cluster.num_devices, len(measurement.layers)
    ones = (1,) * num_ranks
    if num_ranks <= FEW_RANKS:
        tried = pipelines(num_ranks, num_layers)
    else:
        tried = [ones] if num_ranks <= num_layers else []
    most = max(1, FEW_CUTS // max(1, len(tried)))
    found = []
    for replicas in tried:
        machines = Machines.of_stages(cluster, replicas)
        cuts = fastest_cuts(measurement, machines, replicas, num_microbatches, most)
        found += [Division(replicas, balance) for balance in cuts or [even(replicas)]]
    chosen = by_pipedream(measurement, Machines.of_stages(cluster, ones), num_microbatches)
    return [*found, chosen] if chosen else found


@cache
def all_ends(num_layers: int, num_stages: int) -> Whole:
    """A row for each cut: the positions between its stages, 0 and the last included."""
    rows = [(0, *cut, num_layers) for cut in combinations(range(1, num_layers), num_stages - 1)]
    return np.array(rows)


def fastest_cuts(
    measurement: Measurement,
    machines: Machines,
    replicas: Replicas,
    num_microbatches: int,
    most: int,
) -> list[tuple[int, ...]]:
    """Balances of which no other has a lower bound; none if there are too many to look at."""
    num_layers = len(measurement.layers)
    if math.comb(num_layers - 1, len(replicas) - 1) > MANY_CUTS:
        return []
    ends = all_ends(num_layers, len(replicas))
    bounds = _bounds(measurement, machines, replicas, num_microbatches, ends)
    best = np.argsort(bounds, kind="stable")[:most]
    return [tuple(map(int, np.diff(ends[cut]))) for cut in best]


def _bounds(
    measurement: Measurement, machines: Machines, replicas: Replicas, count: int, ends: Whole
) -> Floats:
    layers, placement = measurement.layers, side_by_side(replicas)
    times = np.cumsum([0.0, *(layer.time for layer in layers)])
    gradients = np.cumsum([0.0, *(layer.parameters for layer in layers)])
    speeds = np.array([machines.devices[rank].speed for rank in placement])
    links = [machines.link(*pair) for pair in pairwise(placement)]
    latency, bandwidth = np.array([(link.latency, link.bandwidth) for link in links]).T
    fixed, per_byte = np.array([machines.summing(rank) for rank in placement]).T
    return least_period(
        np.diff(times[ends], axis=1) / speeds,
        latency + np.array(passing_bytes(measurement))[ends[:, 1:-1]] / bandwidth,
        fixed + np.diff(gradients[ends], axis=1) * per_byte,
        replicas,
        count,
    )


def by_pipedream(
    measurement: Measurement, machines: Machines, num_microbatches: int
) -> Division | None:
    """None if that is for fewer ranks or one stage, or takes too long.

    Its formula sums gradients with every micro-batch, and twice as many bytes as a ring does.
    """
    num_ranks = len(machines.devices)
    if num_ranks * len(measurement.layers) > MANY_STATES:
        return None
    sent = passing_bytes(measurement)[1:]
    nodes = [
        Node(
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
    bandwidth = min(FREE, machines.link(0, num_ranks - 1).bandwidth)
    found = partition(Graph(tuple(nodes), ()), num_ranks, bandwidth)
    if found.num_workers < num_ranks or len(found.stages) < 2:
        return None
    return Division(
        tuple(stage.replicas for stage in found.stages),
        tuple(stage.stop - stage.start for stage in found.stages),
    )
