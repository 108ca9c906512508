"""PipeDream's profiles: a graph of layers in a text file, read, and as a `Profile`.

    node1 -- Input -- forward_compute_time=…, backward_compute_time=…, activation_size=…, …
    node2 -- Conv2d(…) -- …, activation_size=[65536.0; 128.0], parameter_size=7168.0 -- stage_id=0
    ⇥node1 -- node2

Nodes stand in any order; milliseconds and bytes. A layer with several outputs has a list of sizes.
"""

from __future__ import annotations

import heapq
import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from stageline.arguments import shown
from stageline.errors import PlanError
from stageline.files import read_text
from stageline.limits import MOST_AMOUNT
from stageline.planning.profiling.profile import LayerCost, Measurement, Profile, ValueCost

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
LONGEST_LINE = 10_000  # characters
FIELD = re.compile(r"(\w{1,64})=(\[[^\]]*\]|[^,\s]*)")
MILLISECOND = 1e-3
SHOWN = 60  # characters of a number in an error


@dataclass(frozen=True)
class Node:
    """A layer, or an input; seconds and bytes. `reads` are the names of the nodes before it."""

    name: str
    description: str
    forward: float
    backward: float
    activation: float
    parameters: float
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Layers, each after those it reads; `inputs` are what the loader brings to every rank."""

    layers: tuple[Node, ...]
    inputs: tuple[Node, ...]

    def readers(self) -> dict[str, tuple[int, ...]]:
        """By the name of a node, the positions of the layers that read it."""
        found: dict[str, list[int]] = defaultdict(list)
        for position, layer in enumerate(self.layers):
            for name in layer.reads:
                found[name].append(position)
        return {node.name: tuple(found[node.name]) for node in (*self.inputs, *self.layers)}


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Raises `PlanError` with the line that is wrong."""
    text = read_text(path, PlanError)
    return parse_graph(text, source=repr(os.fspath(path)))


def parse_graph(text: str, source: str = "the graph") -> Graph:
    nodes: dict[str, Node] = {}
    reads: dict[str, dict[str, None]] = defaultdict(dict)
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"line {number} of {source}"
        if len(line) > LONGEST_LINE:
            raise PlanError(
                f"{place} has {len(line)} characters, but a node or edge has {LONGEST_LINE} at most"
            )
        if line[:1].isspace() and line.strip():
            writer, reader = _edge(line, place)
            reads[reader][writer] = None
        elif line.strip():
            node = _node(line, place)
            if node.name in nodes:
                raise PlanError(f"{place} has {shown(node.name)} again: give each node one line")
            nodes[node.name] = node
    if not nodes:
        raise PlanError(
            f"{source} has no nodes, but needs one at least, like 'node1 -- Input -- …'"
        )
    return _graph(nodes, {reader: tuple(names) for reader, names in reads.items()}, source)


def to_profile(graph: Graph, samples: int = 1) -> Profile:
    """For the planner. The file does not say of how many samples it is; nor how much of a backward
    is for weights: half of it, unless the layer has none. Outputs are kept until then.
    """
    readers = graph.readers()
    values = [ValueCost(-1, readers[node.name], node.activation) for node in graph.inputs]
    values += [
        ValueCost(position, readers[layer.name], layer.activation)
        for position, layer in enumerate(graph.layers)
        if readers[layer.name]
    ]
    costs = tuple(_cost(layer) for layer in graph.layers)
    names = tuple(layer.name for layer in graph.layers)
    return Profile(names, (Measurement(samples, costs, tuple(values)),))


def _cost(layer: Node) -> LayerCost:
    weight_grad = layer.backward / 2 if layer.parameters else 0.0
    return LayerCost(
        forward=layer.forward,
        input_grad=layer.backward - weight_grad,
        weight_grad=weight_grad,
        activation=layer.activation,
        retained=layer.activation if layer.parameters else 0.0,
        parameters=layer.parameters,
        buffers=0.0,
    )


def _edge(line: str, place: str) -> tuple[str, str]:
    names = [name.strip() for name in line.split(" -- ")]
    if len(names) != 2 or not all(names):
        raise PlanError(
            f"{place} is {shown(line.strip())}, but an indented line is an edge: "
            "write it like 'node1 -- node2'"
        )
    return names[0], names[1]


def _node(line: str, place: str) -> Node:
    parts = [part.strip() for part in line.split(" -- ")]
    if len(parts) == 4 and parts[3].startswith("stage_id="):
        parts.pop()  # where PipeDream put it; a new plan puts it elsewhere
    if len(parts) != 3 or not parts[0]:
        raise PlanError(
            f"{place} has {len(parts)} parts between ' -- ', but a node has 3: "
            "write its name, what it is, and its costs"
        )
    found = dict(FIELD.findall(parts[2]))
    forward, backward, activation, parameters = (_number(found, name, place) for name in FIELDS)
    times = (forward * MILLISECOND, backward * MILLISECOND)
    return Node(parts[0], parts[1], *times, activation, parameters)


def _number(found: dict[str, str], name: str, place: str) -> float:
    """A number, or the sum of a list like '[65536.0; 128.0]'."""
    if name not in found:
        raise PlanError(f"{place} has no {name}, but a node needs {', '.join(FIELDS)}: add it")
    try:
        numbers = [float(part) for part in found[name].strip("[]").split(";")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= MOST_AMOUNT for number in numbers):
        most = f", to {MOST_AMOUNT:g}" if max(numbers) > MOST_AMOUNT else ""
        seen = f"{name}={found[name][:SHOWN]}"
        raise PlanError(f"{place} has {seen}, but has to have a number from 0 up{most}")
    return math.fsum(numbers)


def _graph(nodes: dict[str, Node], reads: dict[str, tuple[str, ...]], source: str) -> Graph:
    named = {name for reader, writers in reads.items() for name in (reader, *writers)}
    if unknown := sorted(named - nodes.keys()):
        raise PlanError(
            f"{source} has an edge of {shown(unknown[0])}, but no node of that name: add its line"
        )
    inputs = [
        node
        for node in nodes.values()
        if node.description.startswith("Input") and not reads.get(node.name)
    ]
    order = _in_order(nodes, reads, source)
    brought = {node.name for node in inputs}
    layers = [node for node in order if node.name not in brought]
    return Graph(
        tuple(Node(**(vars(node) | {"reads": reads.get(node.name, ())})) for node in layers),
        tuple(sorted(inputs, key=lambda node: _by_number(node.name))),
    )


def _in_order(nodes: dict[str, Node], reads: dict[str, tuple[str, ...]], source: str) -> list[Node]:
    """Each after those it reads, and else by number, which is the order in which it was run."""
    waiting = Counter({name: len(reads.get(name, ())) for name in nodes})
    readers: dict[str, list[str]] = defaultdict(list)
    for reader, writers in reads.items():
        for writer in writers:
            readers[writer].append(reader)
    ready = [(_by_number(name), name) for name in nodes if not waiting[name]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(nodes[name])
        for reader in readers[name]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (_by_number(reader), reader))
    if len(order) < len(nodes):
        stuck = min((name for name in nodes if waiting[name]), key=_by_number)
        raise PlanError(
            f"{source} has a circle through or before {shown(stuck)}: remove one of its edges"
        )
    return order


def _by_number(name: str) -> tuple[int, str, str]:
    """The order of the first number in a name, of as many digits as it may have."""
    found = re.search(r"[0-9]+", name)
    digits = found[0].lstrip("0") or "0" if found else ""
    return len(digits), digits, name
