"""PipeDream's optimizer: cut a graph of layers into stages, and choose the workers of each stage.

    state     ∅ ── {a} ── {a, b} ────┐
                    └──── {a, c} ── {a, b, c} ── {a, b, c, d}      a before b and c, d after both

A state is a set of layers that contains all layers they read from. A stage is the difference
between a state and a smaller one. By dynamic programming over states, in order of their sizes:

    A(j, m) = min over i ⊂ j and r ≤ m of max(A(i, m - r), T(i, j, r))
    T(i, j, r) = max((compute + 4 (r - 1) · parameters / (B · r)) / r,      all-reduce of r replicas
                     2 · sent by i / (B · r), 2 · sent by j / (B · r))      forward and backward
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stageline.arguments import check_size, shown
from stageline.errors import PlanError
from stageline.limits import LEAST_AMOUNT, MOST_AMOUNT, MOST_STAGES, check_most
from stageline.planning.partition.pipedream_graph import PipedreamGraph, PipedreamNode
from stageline.planning.partition.prefix_costs import Floats, Integers

State = int  # a bit for each layer
MAX_STATES = 2000  # of a graph with many branches; above, only prefixes of the layers' order
TIE = 1e-12


@dataclass(frozen=True)
class PipedreamStage:
    """Layers from `start` up to `stop` of the plan's order, on `replicas` workers."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class PipedreamPlan:
    """The result of PipeDream's optimizer."""

    order: tuple[str, ...]  # the names of the layers; stages are runs of them
    stages: tuple[PipedreamStage, ...]
    bottleneck: float  # seconds per micro-batch of the slowest stage

    @property
    def num_workers(self) -> int:
        return sum(stage.replicas for stage in self.stages)


def pipedream_partition(
    graph: PipedreamGraph, num_workers: int, bandwidth: float = 1e9, *, replicate: bool = True
) -> PipedreamPlan:
    """Return the plan with the smallest bottleneck, on as few of the workers as that needs.

    >>> from stageline.planning.partition.pipedream_graph import parse_graph
    >>> costs = "forward_compute_time=1, backward_compute_time=2, activation_size=1000"
    >>> lines = [f"node{i} -- Linear -- {costs}, parameter_size=0" for i in range(4)]
    >>> edges = [f"\\tnode{i} -- node{i + 1}" for i in range(3)]
    >>> plan = pipedream_partition(parse_graph("\\n".join(lines + edges)), 2, replicate=False)
    >>> [(stage.start, stage.stop, stage.replicas) for stage in plan.stages], plan.bottleneck
    ([(0, 2, 1), (2, 4, 1)], 0.006)
    """
    _check(graph, num_workers, bandwidth)
    states = tuple(_states(graph))
    costs = _StateCosts.of(graph, states, bandwidth)
    max_replicas = num_workers if replicate else 1
    cuts, bottleneck = _best_cuts(costs, num_workers, max_replicas)
    return _plan(graph, [(states[state], replicas) for state, replicas in cuts], bottleneck)


@dataclass(frozen=True, eq=False)
class _StateCosts:
    """The times of each state: to compute its layers, to all-reduce their weights, and to send."""

    states: Sequence[State]
    compute: Floats
    reduction: Floats
    sending: Floats

    @staticmethod
    def of(graph: PipedreamGraph, states: Sequence[State], bandwidth: float) -> _StateCosts:
        readers = _reader_masks(graph)
        rows = [_state_sums(graph.layers, readers, state) for state in states]
        compute, parameters, sent = np.array(rows).T
        return _StateCosts(states, compute, 4 * parameters / bandwidth, 2 * sent / bandwidth)

    def times(self, starts: Integers, stop: int, replicas: int) -> Floats:
        """Return the times of the stages from each of the starting states to the state `stop`."""
        compute = self.compute[stop] - self.compute[starts]
        reduction = self.reduction[stop] - self.reduction[starts]
        busy = (compute + (replicas - 1) / replicas * reduction) / replicas
        sending = np.maximum(self.sending[starts], self.sending[stop]) / replicas
        times: Floats = np.maximum(busy, sending)
        return times


def _state_sums(
    layers: Sequence[PipedreamNode], readers: Sequence[State], state: State
) -> list[float]:
    """Return the seconds and parameters of a state's layers, and the bytes read outside it."""
    inside = [position for position in range(len(layers)) if state >> position & 1]
    return [
        math.fsum(layers[position].forward + layers[position].backward for position in inside),
        math.fsum(layers[position].parameters for position in inside),
        math.fsum(layers[position].activation for position in inside if readers[position] & ~state),
    ]


def _best_cuts(
    costs: _StateCosts, num_workers: int, max_replicas: int
) -> tuple[list[tuple[int, int]], float]:
    """Return the state at the end of each stage with the stage's replicas, and the bottleneck."""
    num_states = len(costs.states)
    best = np.full((num_states, num_workers + 1), np.inf)
    best[0] = 0.0
    previous = np.zeros((num_states, num_workers + 1, 2), dtype=np.int64)  # state and replicas
    for stop in range(1, num_states):
        starts = _smaller_states(costs.states, stop)
        for replicas in range(1, max_replicas + 1):
            times = costs.times(starts, stop, replicas)[:, None]
            tried = np.maximum(best[starts, : num_workers + 1 - replicas], times)
            winner = tried.argmin(axis=0)
            least = tried.min(axis=0)
            better = np.flatnonzero(least < best[stop, replicas:] * (1 - TIE))
            best[stop, replicas + better] = least[better]
            previous[stop, replicas + better, 0] = starts[winner[better]]
            previous[stop, replicas + better, 1] = replicas
    bottleneck = float(best[-1, -1])
    enough = int(np.flatnonzero(best[-1] <= bottleneck * (1 + TIE))[0])
    return _follow_back(previous, enough), bottleneck


def _smaller_states(states: Sequence[State], stop: int) -> Integers:
    """Return the states that are subsets of a state; they come before it."""
    whole = states[stop]
    return np.array([i for i in range(stop) if states[i] & whole == states[i]])


def _follow_back(previous: Integers, workers: int) -> list[tuple[int, int]]:
    cuts = []
    state = len(previous) - 1
    while state:
        start, replicas = (int(number) for number in previous[state, workers])
        cuts.append((state, replicas))
        state, workers = start, workers - replicas
    return cuts[::-1]


def _plan(
    graph: PipedreamGraph, cuts: Sequence[tuple[State, int]], bottleneck: float
) -> PipedreamPlan:
    """Return a plan, whose order has the layers of each stage after those of the stages before."""
    masks = [0, *(state for state, _ in cuts)]
    order = [
        layer.name
        for smaller, larger in pairwise(masks)
        for position, layer in enumerate(graph.layers)
        if (larger & ~smaller) >> position & 1
    ]
    sizes = [mask.bit_count() for mask in masks]
    stages = (
        PipedreamStage(start, stop, replicas)
        for (start, stop), (_, replicas) in zip(pairwise(sizes), cuts, strict=True)
    )
    return PipedreamPlan(tuple(order), tuple(stages), bottleneck)


def _states(graph: PipedreamGraph) -> list[State]:
    """Return all states, smallest first, or only prefixes of the layers if there are too many."""
    reads = _read_masks(graph)
    free = _free_layers(graph)
    found = {0}
    newest = [0]
    while newest and len(found) <= MAX_STATES:
        grown = {
            _with_free_layers(state | 1 << layer, reads, free)
            for state in newest
            for layer in _next_layers(state, reads)
        }
        newest = list(grown - found)
        found |= grown
    if newest:
        return [(1 << size) - 1 for size in range(len(reads) + 1)]
    return sorted(found, key=lambda state: (state.bit_count(), state))


def _next_layers(state: State, reads: Sequence[State]) -> Iterator[int]:
    """Yield the layers outside a state that read from nothing else outside it."""
    for layer, needed in enumerate(reads):
        if not state >> layer & 1 and not needed & ~state:
            yield layer


def _free_layers(graph: PipedreamGraph) -> Sequence[int]:
    """Return the layers without time, parameters and sent bytes, which cost nothing in any stage.

    Most of them select one of several outputs. They are put where the layers they read from are; to
    try each of them in every stage would double the states of GNMT for each of a dozen layers.
    """
    readers = graph.readers()
    return [
        position
        for position, layer in enumerate(graph.layers)
        if not layer.forward + layer.backward + layer.parameters
        and not (layer.activation and readers[layer.name])
    ]


def _with_free_layers(state: State, reads: Sequence[State], free: Sequence[int]) -> State:
    for layer in free:  # in order, since one may read from another
        if not reads[layer] & ~state:
            state |= 1 << layer
    return state


def _read_masks(graph: PipedreamGraph) -> list[State]:
    """Return for each layer the set of layers that it reads from."""
    positions = {layer.name: position for position, layer in enumerate(graph.layers)}
    return [
        sum(1 << positions[name] for name in layer.reads if name in positions)
        for layer in graph.layers
    ]


def _reader_masks(graph: PipedreamGraph) -> list[State]:
    """Return for each layer the set of layers that read from it."""
    readers = graph.readers()
    return [sum(1 << position for position in readers[layer.name]) for layer in graph.layers]


def _check(graph: PipedreamGraph, num_workers: int, bandwidth: float) -> None:
    if not graph.layers:
        raise PlanError(
            "the graph has only inputs, but a plan needs at least one layer: add its line"
        )
    check_size("num_workers", num_workers, error=PlanError)
    check_most("num_workers", num_workers, MOST_STAGES, error=PlanError)
    if not LEAST_AMOUNT <= bandwidth <= MOST_AMOUNT:
        raise PlanError(
            f"bandwidth is {shown(bandwidth)}, but has to be finite and above 0: give bytes per "
            "second"
        )
