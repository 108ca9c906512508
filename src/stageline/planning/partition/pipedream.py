"""PipeDream's optimizer: cut a graph of layers into stages, and give each as many workers as pays.

    state     ∅ ── {a} ── {a, b} ────┐
                    └──── {a, c} ── {a, b, c} ── {a, b, c, d}      a before b and c, d after both

A state is a set of layers with all that they read, so a stage is what one state has and a smaller
one has not. By dynamic programming over states, in order of their sizes:

    A(j, m) = min over i ⊂ j and r ≤ m of max(A(i, m - r), T(i, j, r))
    T(i, j, r) = max((compute + 4 (r - 1) · parameters / (B · r)) / r,      all-reduce of r replicas
                     2 · sent by i / (B · r), 2 · sent by j / (B · r))      there and back again
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
from stageline.planning.partition.chain import Floats, Whole
from stageline.planning.partition.pipedream_graph import Graph, Node

State = int  # a bit for each layer
MOST_STATES = 2000  # of a graph with many branches; above, only those that follow the layers' order
TIE = 1e-12


@dataclass(frozen=True)
class Stage:
    """Layers `start` to `stop` of the plan's order, on so many workers."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class PipedreamPlan:
    """Stages are runs of `order`, the names of the layers; seconds a micro-batch on the slowest."""

    order: tuple[str, ...]
    stages: tuple[Stage, ...]
    bottleneck: float

    @property
    def num_workers(self) -> int:
        return sum(stage.replicas for stage in self.stages)


def partition(
    graph: Graph, num_workers: int, bandwidth: float = 1e9, *, replicate: bool = True
) -> PipedreamPlan:
    """The smallest bottleneck with up to that many workers, and with no more than it takes.

    >>> from stageline.planning.partition.pipedream_graph import parse_graph
    >>> costs = "forward_compute_time=1, backward_compute_time=2, activation_size=1000"
    >>> lines = [f"node{i} -- Linear -- {costs}, parameter_size=0" for i in range(4)]
    >>> edges = [f"\\tnode{i} -- node{i + 1}" for i in range(3)]
    >>> plan = partition(parse_graph("\\n".join(lines + edges)), 2, replicate=False)
    >>> plan.stages, plan.bottleneck
    ((Stage(start=0, stop=2, replicas=1), Stage(start=2, stop=4, replicas=1)), 0.006)
    """
    _check(graph, num_workers, bandwidth)
    states = tuple(_states(graph))
    table = _Table.of(graph, states, bandwidth)
    most_replicas = num_workers if replicate else 1
    cuts, bottleneck = _best(table, num_workers, most_replicas)
    return _plan(graph, [(states[state], replicas) for state, replicas in cuts], bottleneck)


@dataclass(frozen=True, eq=False)
class _Table:
    """For each state: seconds of its layers, of an all-reduce of theirs, and of what it sends."""

    states: Sequence[State]
    compute: Floats
    reduction: Floats
    sending: Floats

    @staticmethod
    def of(graph: Graph, states: Sequence[State], bandwidth: float) -> _Table:
        readers = _reader_masks(graph)
        numbers = [_numbers(graph.layers, readers, state) for state in states]
        compute, parameters, sent = np.array(numbers).T
        return _Table(states, compute, 4 * parameters / bandwidth, 2 * sent / bandwidth)

    def times(self, starts: Whole, stop: int, replicas: int) -> Floats:
        """Of the stages from each of these states to that one."""
        compute = self.compute[stop] - self.compute[starts]
        reduction = self.reduction[stop] - self.reduction[starts]
        busy = (compute + (replicas - 1) / replicas * reduction) / replicas
        sending = np.maximum(self.sending[starts], self.sending[stop]) / replicas
        times: Floats = np.maximum(busy, sending)
        return times


def _numbers(layers: Sequence[Node], readers: Sequence[State], state: State) -> list[float]:
    """Seconds and parameters of a state's layers, and the bytes that those outside it read."""
    inside = [position for position in range(len(layers)) if state >> position & 1]
    return [
        math.fsum(layers[position].forward + layers[position].backward for position in inside),
        math.fsum(layers[position].parameters for position in inside),
        math.fsum(layers[position].activation for position in inside if readers[position] & ~state),
    ]


def _best(
    table: _Table, num_workers: int, most_replicas: int
) -> tuple[list[tuple[int, int]], float]:
    """The states between stages with the replicas of the stage in front, and the bottleneck."""
    num_states = len(table.states)
    best = np.full((num_states, num_workers + 1), np.inf)
    best[0] = 0.0
    before = np.zeros((num_states, num_workers + 1, 2), dtype=np.int64)  # state and replicas
    for stop in range(1, num_states):
        starts = _inside(table.states, stop)
        for replicas in range(1, most_replicas + 1):
            times = table.times(starts, stop, replicas)[:, None]
            tried = np.maximum(best[starts, : num_workers + 1 - replicas], times)
            winner = tried.argmin(axis=0)
            least = tried.min(axis=0)
            better = np.flatnonzero(least < best[stop, replicas:] * (1 - TIE))
            best[stop, replicas + better] = least[better]
            before[stop, replicas + better, 0] = starts[winner[better]]
            before[stop, replicas + better, 1] = replicas
    bottleneck = float(best[-1, -1])
    enough = int(np.flatnonzero(best[-1] <= bottleneck * (1 + TIE))[0])
    return _followed_back(before, enough), bottleneck


def _inside(states: Sequence[State], stop: int) -> Whole:
    """The states that are part of this one; they come before it."""
    whole = states[stop]
    return np.array([i for i in range(stop) if states[i] & whole == states[i]])


def _followed_back(before: Whole, workers: int) -> list[tuple[int, int]]:
    cuts = []
    state = len(before) - 1
    while state:
        start, replicas = (int(number) for number in before[state, workers])
        cuts.append((state, replicas))
        state, workers = start, workers - replicas
    return cuts[::-1]


def _plan(graph: Graph, cuts: Sequence[tuple[State, int]], bottleneck: float) -> PipedreamPlan:
    """Each state is a run of layers longer than the one before it, once they are in order."""
    masks = [0, *(state for state, _ in cuts)]
    order = [
        layer.name
        for smaller, larger in pairwise(masks)
        for position, layer in enumerate(graph.layers)
        if (larger & ~smaller) >> position & 1
    ]
    sizes = [mask.bit_count() for mask in masks]
    stages = (
        Stage(start, stop, replicas)
        for (start, stop), (_, replicas) in zip(pairwise(sizes), cuts, strict=True)
    )
    return PipedreamPlan(tuple(order), tuple(stages), bottleneck)


def _states(graph: Graph) -> list[State]:
    """All of them, smallest first; of too many, those that are the first layers in order."""
    reads = _read_masks(graph)
    free = _free(graph)
    found = {0}
    newest = [0]
    while newest and len(found) <= MOST_STATES:
        grown = {
            _closed(state | 1 << layer, reads, free)
            for state in newest
            for layer in _next(state, reads)
        }
        newest = list(grown - found)
        found |= grown
    if newest:
        return [(1 << size) - 1 for size in range(len(reads) + 1)]
    return sorted(found, key=lambda state: (state.bit_count(), state))


def _next(state: State, reads: Sequence[State]) -> Iterator[int]:
    """The layers outside a state that read nothing else outside it."""
    for layer, needed in enumerate(reads):
        if not state >> layer & 1 and not needed & ~state:
            yield layer


def _free(graph: Graph) -> Sequence[int]:
    """Layers that cost nothing wherever they are: neither time, parameters nor anything sent.

    Views of one output of several, mostly. Wherever what they read is, they may be too; to try each
    of them in every stage would double the states of GNMT for each of a dozen layers.
    """
    readers = graph.readers()
    return [
        position
        for position, layer in enumerate(graph.layers)
        if not layer.forward + layer.backward + layer.parameters
        and not (layer.activation and readers[layer.name])
    ]


def _closed(state: State, reads: Sequence[State], free: Sequence[int]) -> State:
    for layer in free:  # in their order, so that one may follow another
        if not reads[layer] & ~state:
            state |= 1 << layer
    return state


def _read_masks(graph: Graph) -> list[State]:
    """For each layer, the layers that it reads."""
    positions = {layer.name: position for position, layer in enumerate(graph.layers)}
    return [
        sum(1 << positions[name] for name in layer.reads if name in positions)
        for layer in graph.layers
    ]


def _reader_masks(graph: Graph) -> list[State]:
    """For each layer, the layers that read it."""
    readers = graph.readers()
    return [sum(1 << position for position in readers[layer.name]) for layer in graph.layers]


def _check(graph: Graph, num_workers: int, bandwidth: float) -> None:
    if not graph.layers:
        raise PlanError(
            "the graph has inputs only, but a plan needs a layer at least: add its line"
        )
    check_size("num_workers", num_workers, error=PlanError)
    check_most("num_workers", num_workers, MOST_STAGES, error=PlanError)
    if not LEAST_AMOUNT <= bandwidth <= MOST_AMOUNT:
        raise PlanError(
            f"bandwidth is {shown(bandwidth)}, but has to be finite and above 0: give bytes a "
            "second"
        )
