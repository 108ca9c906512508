"""Read PipeDream's profiles, text files with a graph of layers, and convert them to `Profile`.

    node1 -- Input -- forward_compute_time=…, backward_compute_time=…, activation_size=…, …
    node2 -- Conv2d(…) -- …, activation_size=[65536.0; 128.0], parameter_size=7168.0 -- stage_id=0
    ⇥node1 -- node2

Nodes may be in any order. Times are milliseconds, sizes bytes, with a list for several outputs.
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
from stageline.planning.profiling.profile_result import LayerCost, Measurement, Profile, ValueCost

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
MAX_LINE_LENGTH = 10_000  # characters
FIELD = re.compile(r"(\w{1,64})=(\[[^\]]*\]|[^,\s]*)")
MILLISECOND = 1e-3
MAX_SHOWN = 60  # characters of a number in an error


@dataclass(frozen=True)
class PipedreamNode:
    """A layer or an input, in seconds and bytes; `reads` names the nodes that it reads from."""

    name: str
    description: str
    forward: float
    backward: float
    activation: float
    parameters: float
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class PipedreamGraph:
    """Layers, each after those that it reads from, and the inputs from the data loader."""

    layers: tuple[PipedreamNode, ...]
    inputs: tuple[PipedreamNode, ...]

    def readers(self) -> dict[str, tuple[int, ...]]:
        """Return the positions of the layers that read from each node, by its name."""
        found: dict[str, list[int]] = defaultdict(list)
        for position, layer in enumerate(self.layers):
            for name in layer.reads:
                found[name].append(position)
        return {node.name: tuple(found[node.name]) for node in (*self.inputs, *self.layers)}


def read_graph(path: str | os.PathLike[str]) -> PipedreamGraph:
    """Read a file; raise `PlanError` with the number of the first invalid line."""
    text = read_text(path, PlanError)
    return parse_graph(text, source=repr(os.fspath(path)))


def parse_graph(text: str, source: str = "the graph") -> PipedreamGraph:
    """Parse the text of a file; `source` names it in errors."""
    nodes: dict[str, PipedreamNode] = {}
    reads: dict[str, dict[str, None]] = defaultdict(dict)
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"line {number} of {source}"
        if len(line) > MAX_LINE_LENGTH:
            raise PlanError(
                f"{place} has {len(line)} characters, but at most {MAX_LINE_LENGTH} are allowed"
            )
        if line[:1].isspace() and line.strip():
            writer, reader = _edge(line, place)
            reads[reader][writer] = None
        elif line.strip():
            node = _node(line, place)
            if node.name in nodes:
                raise PlanError(f"{place} repeats node {shown(node.name)}: give each node one line")
            nodes[node.name] = node
    if not nodes:
        raise PlanError(
            f"{source} has no nodes, but needs at least one, like 'node1 -- Input -- …'"
        )
    return _graph(nodes, {reader: tuple(names) for reader, names in reads.items()}, source)


def to_profile(graph: PipedreamGraph, samples: int = 1) -> Profile:
    """Return a profile for `sl.plan`.

    The file does not contain the number of samples, nor which part of a backward is for weights:
    half of it is assumed, or none for a layer without weights. Outputs are kept until W.
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


def _cost(layer: PipedreamNode) -> LayerCost:
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


def _node(line: str, place: str) -> PipedreamNode:
    parts = [part.strip() for part in line.split(" -- ")]
    if len(parts) == 4 and parts[3].startswith("stage_id="):
        parts.pop()  # the stage of PipeDream's own plan
    if len(parts) != 3 or not parts[0]:
        raise PlanError(
            f"{place} has {len(parts)} parts between ' -- ', but a node has 3: "
            "write its name, its description and its costs"
        )
    found = dict(FIELD.findall(parts[2]))
    forward, backward, activation, parameters = (_number(found, name, place) for name in FIELDS)
    times = (forward * MILLISECOND, backward * MILLISECOND)
    return PipedreamNode(parts[0], parts[1], *times, activation, parameters)


def _number(found: dict[str, str], name: str, place: str) -> float:
    """Return a number, or the sum of a list like '[65536.0; 128.0]'."""
    if name not in found:
        raise PlanError(f"{place} has no {name}, but a node needs {', '.join(FIELDS)}: add it")
    try:
        numbers = [float(part) for part in found[name].strip("[]").split(";")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= MOST_AMOUNT for number in numbers):
        limit = f", at most {MOST_AMOUNT:g}" if max(numbers) > MOST_AMOUNT else ""
        given = f"{name}={found[name][:MAX_SHOWN]}"
        raise PlanError(f"{place} has {given}, but needs a number from 0 up{limit}")
    return math.fsum(numbers)


def _graph(
    nodes: dict[str, PipedreamNode], reads: dict[str, tuple[str, ...]], source: str
) -> PipedreamGraph:
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
    order = _topological_order(nodes, reads, source)
    input_names = {node.name for node in inputs}
    layers = [node for node in order if node.name not in input_names]
    return PipedreamGraph(
        tuple(
            PipedreamNode(**(vars(node) | {"reads": reads.get(node.name, ())})) for node in layers
        ),
        tuple(sorted(inputs, key=lambda node: _number_key(node.name))),
    )


def _topological_order(
    nodes: dict[str, PipedreamNode], reads: dict[str, tuple[str, ...]], source: str
) -> list[PipedreamNode]:
    """Return each node after those it reads from, otherwise by number, the order of execution."""
    waiting = Counter({name: len(reads.get(name, ())) for name in nodes})
    readers: dict[str, list[str]] = defaultdict(list)
    for reader, writers in reads.items():
        for writer in writers:
            readers[writer].append(reader)
    ready = [(_number_key(name), name) for name in nodes if not waiting[name]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(nodes[name])
        for reader in readers[name]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (_number_key(reader), reader))
    if len(order) < len(nodes):
        stuck = min((name for name in nodes if waiting[name]), key=_number_key)
        raise PlanError(
            f"{source} has a cycle through or before {shown(stuck)}: remove one of its edges"
        )
    return order


def _number_key(name: str) -> tuple[int, str, str]:
    """Return a sort key for the first number in a name, which may have any number of digits."""
    found = re.search(r"[0-9]+", name)
    digits = found[0].lstrip("0") or "0" if found else ""
    return len(digits), digits, name
