"""PipeDream's profiles: read, refused and converted to `Profile`.

`tests/figures/vgg16.graph.txt` is the profile of VGG-16 that PipeDream published
(github.com/msr-fiddle/pipedream, profiler/image_classification/profiles/vgg16).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stageline.errors import PlanError
from stageline.planning.partition.pipedream_graph import (
    parse_graph,
    read_graph,
    to_profile,
)

VGG16 = Path(__file__).parents[1] / "figures" / "vgg16.graph.txt"
ONE_WORKER = 0.672535  # seconds a micro-batch


def node(name: str, kind: str = "Linear", **costs: float | str) -> str:
    fields = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    given = {"forward": 1.0, "backward": 2.0, "activation": 1000.0, "parameters": 0.0} | costs
    numbers = ", ".join(
        f"{field}={value}" for field, value in zip(fields, given.values(), strict=True)
    )
    return f"{name} -- {kind} -- {numbers}"


def refused(message: str) -> Any:
    return pytest.raises(PlanError, match=f"^{re.escape(message)}$")


#      ┌── b ── c ──┐
#  a ──┤            ├── e        and a pair of outputs, as recurrent layers have
#      └───── d ────┘
BRANCHES = "\n".join(
    [
        node("node5", "Add", forward=0.0, backward=0.0),
        node("node3", activation="[300.0; 20.0; 4.0]", parameters=64.0),
        node("node1", "Input", forward=9.0, backward=0.0, activation=50.0),
        node("node10", "Conv", activation=8.0) + " -- stage_id=1",
        node("node2", parameters=32.0) + " -- stage_id=0",
        node("node4", backward=5.0),
        *("\tnode4 -- node5", "\tnode10 -- node5", "\tnode1 -- node2", "\tnode2 -- node3"),
        *("\tnode3 -- node4", "\tnode2 -- node10", ""),
    ]
)


def test_a_graph_is_read_in_topological_order() -> None:
    graph = parse_graph(BRANCHES)
    assert [layer.name for layer in graph.layers] == ["node2", "node3", "node4", "node10", "node5"]
    assert [layer.reads for layer in graph.layers[3:]] == [("node2",), ("node4", "node10")]
    assert [layer.activation for layer in graph.layers] == [1000.0, 324.0, 1000.0, 8.0, 1000.0]
    assert (graph.layers[2].forward, graph.layers[2].backward) == (0.001, 0.005)


def test_inputs_are_not_layers() -> None:
    graph = parse_graph(BRANCHES)
    assert [given.name for given in graph.inputs] == ["node1"]
    assert graph.readers() == {
        "node1": (0,),
        "node2": (1, 3),
        "node3": (2,),
        "node4": (4,),
        "node10": (4,),
        "node5": (),
    }


def test_all_layers_of_vgg16_are_read() -> None:
    graph = read_graph(VGG16)
    assert [layer.name for layer in graph.layers] == [f"node{i}" for i in range(2, 42)]
    assert sum(layer.forward + layer.backward for layer in graph.layers) == pytest.approx(
        ONE_WORKER
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the graph has no nodes, but needs at least one, like 'node1 -- Input -- …'"),
        (
            "node1 -- Linear",
            (
                "line 1 of the graph has 2 parts between ' -- ', but a node has 3: "
                "write its name, its description and its costs"
            ),
        ),
        (
            node("a") + "\nb -- Linear -- forward_compute_time=1, activation_size=3",
            (
                "line 2 of the graph has no backward_compute_time, but a node needs "
                "forward_compute_time, backward_compute_time, activation_size, parameter_size: "
                "add it"
            ),
        ),
        (
            node("a", forward=-1.5),
            "line 1 of the graph has forward_compute_time=-1.5, but needs a number from 0 up",
        ),
        (
            node("a", activation="[1.0; x]"),
            "line 1 of the graph has activation_size=[1.0; x], but needs a number from 0 up",
        ),
        (
            node("a", parameters="nan"),
            "line 1 of the graph has parameter_size=nan, but needs a number from 0 up",
        ),
        (
            node("a") + "\n" + node("a"),
            "line 2 of the graph repeats node 'a': give each node one line",
        ),
        (
            node("a") + "\n\ta --",
            (
                "line 2 of the graph is 'a --', but an indented line is an edge: "
                "write it like 'node1 -- node2'"
            ),
        ),
        (
            node("a") + "\n\ta -- b",
            "the graph has an edge of 'b', but no node of that name: add its line",
        ),
        (
            "\n".join([node("a"), node("b"), "\ta -- b", "\tb -- a"]),
            "the graph has a cycle through or before 'a': remove one of its edges",
        ),
    ],
)
def test_an_invalid_graph_is_refused_with_its_line(text: str, message: str) -> None:
    with refused(message):
        parse_graph(text)


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("node1")
    with pytest.raises(PlanError, match=re.escape(f"line 1 of {str(path)!r} has 1 parts")):
        read_graph(path)
    with pytest.raises(PlanError, match="cannot be read"):
        read_graph(tmp_path / "nowhere.txt")


def test_a_graph_is_converted_to_a_profile() -> None:
    profile = to_profile(parse_graph(BRANCHES))
    measurement = profile.at(1)
    assert profile.names == ("node2", "node3", "node4", "node10", "node5")
    assert (measurement.layers[0].input_grad, measurement.layers[0].weight_grad) == (0.001, 0.001)
    assert (measurement.layers[2].input_grad, measurement.layers[2].weight_grad) == (0.005, 0.0)
    assert [(value.writer, value.readers, value.size) for value in measurement.values] == [
        *((-1, (0,), 50.0), (0, (1, 3), 1000.0), (1, (2,), 324.0)),
        *((2, (4,), 1000.0), (3, (4,), 8.0)),
    ]
