"""PipeDream's optimizer.

The figures that PipeDream's own optimizer reports for VGG-16 at 1e9 bytes per second are the
reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.test_pipedream_graph import ONE_WORKER, VGG16, node, refused

from stageline.planning.partition import pipedream
from stageline.planning.partition.one_stage_per_rank import split_layers
from stageline.planning.partition.pipedream import (
    PipedreamPlan,
    PipedreamStage,
    pipedream_partition,
)
from stageline.planning.partition.pipedream_graph import (
    PipedreamGraph,
    parse_graph,
    read_graph,
)


@pytest.mark.parametrize(
    ("workers", "stages", "bottleneck"),
    [
        (1, (PipedreamStage(0, 40, 1),), ONE_WORKER),
        (2, (PipedreamStage(0, 10, 1), PipedreamStage(10, 40, 1)), 0.411041792),
        (4, (PipedreamStage(0, 17, 3), PipedreamStage(17, 40, 1)), 0.205520896),
        (8, (PipedreamStage(0, 24, 7), PipedreamStage(24, 40, 1)), 0.103833170),
        (
            16,
            (PipedreamStage(0, 24, 13), PipedreamStage(24, 31, 2), PipedreamStage(31, 40, 1)),
            0.056529767,
        ),
    ],
)
def test_vgg16_is_cut_as_pipedream_cuts_it(
    workers: int, stages: tuple[PipedreamStage, ...], bottleneck: float
) -> None:
    """Its figures are for 4 and 8 workers; the others are what its formula has as the least."""
    plan = pipedream_partition(read_graph(VGG16), workers)
    assert plan.stages == stages
    assert plan.bottleneck == pytest.approx(bottleneck, abs=1e-9)


def test_without_replicas_a_third_worker_does_not_speed_up_vgg16() -> None:
    """Up to layer 10 a cut sends 205,520,896 bytes or more, there and back in 0.41 s; every cheaper
    one comes later, and leaves the first worker with more than that to compute.
    """
    plans = [
        pipedream_partition(read_graph(VGG16), workers, replicate=False) for workers in (2, 4, 16)
    ]
    assert {plan.stages for plan in plans} == {
        (PipedreamStage(0, 10, 1), PipedreamStage(10, 40, 1))
    }


def test_a_fast_network_spreads_layers_over_all_workers() -> None:
    graph = read_graph(VGG16)
    alone = pipedream_partition(graph, 4, bandwidth=1e15, replicate=False)
    costs = [layer.forward + layer.backward for layer in graph.layers]
    balance = split_layers(costs, 4)
    ends = [sum(balance[:stage]) for stage in range(5)]
    least = max(sum(costs[a:b]) for a, b in pairwise(ends))
    assert alone.bottleneck == pytest.approx(least)
    shared = pipedream_partition(graph, 4, bandwidth=1e15)
    assert shared.bottleneck == pytest.approx(ONE_WORKER / 4, rel=1e-5)


def test_a_branch_stays_in_one_stage_in_any_order_of_its_lines() -> None:
    """Two branches of three layers, of which only the last has a small output."""
    names = ["a", "b1", "c1", "b2", "c2", "b3", "c3", "d"]
    time = dict.fromkeys(names, 10.0) | {"a": 0.0, "d": 0.0}
    size = dict.fromkeys(names, 1000.0) | dict.fromkeys(["b1", "b2", "c1", "c2"], 1e6)
    lines = [node(n, forward=time[n], backward=0.0, activation=size[n]) for n in names]
    paths = [["a", "b1", "b2", "b3", "d"], ["a", "c1", "c2", "c3", "d"]]
    edges = [f"\t{x} -- {y}" for path in paths for x, y in pairwise(path)]
    plan = pipedream_partition(
        parse_graph("\n".join(lines + edges)), 2, bandwidth=1e6, replicate=False
    )
    assert plan.bottleneck == pytest.approx(0.030)
    first = set(plan.order[: plan.stages[0].stop])
    assert first in ({"a", "b1", "b2", "b3"}, {"a", "c1", "c2", "c3"})


def all_states(graph: PipedreamGraph) -> list[frozenset[str]]:
    names = [layer.name for layer in graph.layers]
    reads = {layer.name: set(layer.reads) for layer in graph.layers}
    sets = (frozenset(c) for size in range(len(names) + 1) for c in combinations(names, size))
    return [state for state in sets if all(reads[name] <= state for name in state)]


def stage_time(
    graph: PipedreamGraph, old: frozenset[str], new: frozenset[str], replicas: int, bandwidth: float
) -> float:
    def sent(state: frozenset[str]) -> float:
        read = {name for layer in graph.layers if layer.name not in state for name in layer.reads}
        return sum(layer.activation for layer in graph.layers if layer.name in state & read)

    inside = [layer for layer in graph.layers if layer.name in new - old]
    compute = sum(layer.forward + layer.backward for layer in inside)
    parameters = sum(layer.parameters for layer in inside)
    busy = (compute + 4 * (replicas - 1) * parameters / (bandwidth * replicas)) / replicas
    return max(busy, 2 * max(sent(old), sent(new)) / (bandwidth * replicas))


def all_bottlenecks(
    graph: PipedreamGraph, workers: int, bandwidth: float, most_replicas: int
) -> Iterator[float]:
    states = all_states(graph)

    def grow(state: frozenset[str], left: int, worst: float) -> Iterator[float]:
        if state == states[-1]:
            yield worst
        for larger in states:
            if state < larger:
                for replicas in range(1, min(left, most_replicas) + 1):
                    time = stage_time(graph, state, larger, replicas, bandwidth)
                    yield from grow(larger, left - replicas, max(worst, time))

    return grow(states[0], workers, 0.0)


@st.composite
def graphs(draw: st.DrawFn) -> PipedreamGraph:
    size = draw(st.integers(1, 5))
    costs = st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0])
    fields = ("forward", "backward", "activation", "parameters")
    lines = [
        node(f"node{i}", "Linear", **{name: draw(costs) for name in fields}) for i in range(size)
    ]
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    edges = [f"\tnode{a} -- node{b}" for a, b in pairs if draw(st.booleans())]
    return parse_graph("\n".join(draw(st.permutations(lines)) + edges))


def check_plan(graph: PipedreamGraph, plan: PipedreamPlan, bandwidth: float) -> None:
    """Check that the stages of a plan are in a valid order, and have its bottleneck."""
    seen: set[str] = set()
    for layer in plan.order:
        assert set(next(node for node in graph.layers if node.name == layer).reads) <= seen
        seen.add(layer)
    assert len(plan.order) == len(graph.layers) == plan.stages[-1].stop
    states = [frozenset(plan.order[: stage.stop]) for stage in plan.stages]
    times = [
        stage_time(graph, old, new, stage.replicas, bandwidth)
        for old, new, stage in zip([frozenset(), *states], states, plan.stages, strict=False)
    ]
    assert plan.bottleneck == pytest.approx(max(times))


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(1, 3), st.booleans(), st.sampled_from([300.0, 1000.0, 1e5]))
def test_a_plan_is_the_best_of_all_plans(
    graph: PipedreamGraph, workers: int, replicate: bool, bandwidth: float
) -> None:
    plan = pipedream_partition(graph, workers, bandwidth, replicate=replicate)
    check_plan(graph, plan, bandwidth)
    assert plan.num_workers <= workers
    most_replicas = workers if replicate else 1
    best = min(all_bottlenecks(graph, workers, bandwidth, most_replicas))
    assert plan.bottleneck == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_a_graph_with_too_many_states_is_cut_in_the_order_of_its_layers() -> None:
    """Twelve branches of three layers have 4^12 states."""
    branches = [[f"node{3 * b + i + 1}" for i in range(3)] for b in range(12)]
    lines = [node("node0"), node("node99")] + [node(name) for names in branches for name in names]
    edges = [
        f"\t{a} -- {b}"
        for names in branches
        for a, b in [
            ("node0", names[0]),
            *pairwise(names),
            (names[-1], "node99"),
        ]
    ]
    graph = parse_graph("\n".join(lines + edges))
    plan = pipedream_partition(graph, 2, replicate=False)
    check_plan(graph, plan, 1e9)
    assert plan.bottleneck == pytest.approx(19 * 0.003)
    assert len(pipedream._states(graph)) == 39


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0, but has to be a whole number from 1 up"),
        (
            {"num_workers": 1, "bandwidth": 0},
            "bandwidth is 0, but has to be finite and above 0: give bytes per second",
        ),
    ],
)
def test_invalid_workers_and_bandwidths_are_refused(given: dict[str, Any], message: str) -> None:
    with refused(message):
        pipedream_partition(parse_graph(node("a")), **given)


def test_a_graph_without_layers_is_refused() -> None:
    with refused("the graph has only inputs, but a plan needs at least one layer: add its line"):
        pipedream_partition(parse_graph(node("a", "Input")), 1)
