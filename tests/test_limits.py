"""Sizes and values out of range give one of Stageline's own errors within a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.arguments import check_arguments, shown
from stageline.cli.app import BAD_INPUT, main
from stageline.cli.launch import launch
from stageline.planning.partition.pipedream import pipedream_partition
from stageline.planning.partition.pipedream_graph import parse_graph
from stageline.planning.profiling.profile_result import LayerCost, Measurement, Profile
from stageline.planning.profiling.repeat_layers import repeat_layers
from stageline.zoo.cases import grouped

LAYER = LayerCost(1.0, 1.0, 1.0, 100, 100, 40, 0)
PROFILE = Profile(("a", "b"), (Measurement(1, (LAYER, LAYER), ()),))
CLUSTER = sl.Cluster(2, "1GiB")
MODEL, SAMPLE = nn.Linear(2, 2), torch.ones(4, 2)
GRAPH = parse_graph(
    "node1 -- Linear -- forward_compute_time=1, backward_compute_time=1, activation_size=1, "
    "parameter_size=1"
)
HUGE = (10**11, 10**14, 10**400, 10**5000)


def refused_in_a_second(call: Callable[[], object], *words: str) -> None:
    start = time.process_time()
    with pytest.raises(sl.StagelineError) as caught:
        call()
    assert time.process_time() - start < 1
    message = str(caught.value)
    assert len(message) < 1000
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", sl.schedule_names())
def test_a_schedule_that_does_not_fit_in_memory_is_an_error(name: str) -> None:
    def build(**sizes: Any) -> Callable[[], sl.Schedule]:
        usual: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8}
        return lambda: sl.build_schedule(name, **usual | sizes)

    for size in HUGE:
        refused_in_a_second(build(num_ranks=size), "but")
        refused_in_a_second(build(num_microbatches=size), "use")
        refused_in_a_second(build(num_minibatches=size), "use")
        refused_in_a_second(build(num_ranks=size, num_microbatches=size))
        refused_in_a_second(build(chunks_per_rank=size))
        refused_in_a_second(build(group_size=size))
        refused_in_a_second(build(replicas=[size, 1]))
    refused_in_a_second(build(num_ranks=4_000, num_microbatches=20_000), "5,000,000 at most")


def test_the_error_says_what_was_given_what_the_limit_is_and_what_to_do() -> None:
    message = (
        "4 stages with 100000000000000 micro-batches are 400000000000000 forwards, but a schedule "
        "can have 5,000,000 at most: use at most 1,250,000 micro-batches, or fewer stages or "
        "mini-batches"
    )
    with pytest.raises(sl.ScheduleError) as caught:
        sl.build_schedule("1f1b", num_ranks=4, num_microbatches=10**14)
    assert str(caught.value) == message
    with pytest.raises(sl.ScheduleError, match=r"^num_ranks is 100000000000, but can be 10,000 at"):
        sl.build_schedule("1f1b", num_ranks=10**11, num_microbatches=8)


def test_a_thousand_ranks_are_within_the_limits() -> None:
    schedule = sl.build_schedule("1f1b", num_ranks=1_000, num_microbatches=4)
    timeline = sl.simulate(schedule)
    assert timeline.makespan == 3 * (4 + 999)


def test_time_grows_with_the_ranks_and_not_with_their_square() -> None:
    """Quadratic code took two minutes for 20,000 ranks."""
    start = time.process_time()
    sl.check(sl.build_schedule("1f1b", num_ranks=5_000, num_microbatches=1))
    assert time.process_time() - start < 5


@pytest.mark.parametrize("size", HUGE, ids=shown)
def test_searches_clusters_and_plans_have_limits(size: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for call in (
        lambda: sl.search_schedule(size, 4),
        lambda: sl.search_schedule(4, size),
        lambda: sl.search_schedule(4, 4, chunks_per_rank=size),
        lambda: sl.search_schedule(2, 4, memory_limit=size),
        lambda: sl.Cluster(size, "22GiB"),
        lambda: sl.Level("machine", size, 1e9),
        lambda: sl.Device(size if size > 10**60 else str(size) * 50),
        lambda: CLUSTER.device(size),
        lambda: sl.plan(PROFILE, CLUSTER, batch_size=size),
        lambda: PROFILE.at(size),
        lambda: pipedream_partition(GRAPH, size),
        lambda: repeat_layers(PROFILE, (size, 1)),
        lambda: sl.profile(MODEL, SAMPLE, sizes=[size]),
        lambda: sl.profile(MODEL, SAMPLE, ranks=size),
        lambda: sl.estimate(MODEL, SAMPLE, flops=1e9, bandwidth=1e9, sizes=[1, size]),
        lambda: launch(script, [], size),
        lambda: launch(script, [], 2, max_restarts=size),
    ):
        refused_in_a_second(call)


def test_a_pipeline_of_impossible_sizes_is_an_error() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for sizes in ({"num_ranks": 10**11}, {"num_microbatches": 10**14}):
        given: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2} | sizes
        refused_in_a_second(partial(sl.Pipeline, layers, nn.functional.mse_loss, **grouped(given)))


@pytest.mark.parametrize(
    "value", [1e308, 1e61, 1e-308, math.inf, math.nan, 10**400, 10**5000], ids=shown
)
def test_amounts_whose_sums_would_overflow_are_an_error(value: float) -> None:
    for call in (
        lambda: sl.Costs(forward=value),
        lambda: sl.Costs(parameters=[1.0, value]),
        lambda: sl.Costs.of_a_rank(2, forward=value),
        lambda: sl.Link(latency=value),
        lambda: sl.Device(value),
        lambda: sl.Device(1e9, speed=value),
        lambda: sl.Level("machine", 2, bandwidth=value),
        lambda: LayerCost(value, 1.0, 1.0, 1, 1, 1, 0),
    ):
        refused_in_a_second(call)


def test_the_largest_amounts_are_simulated_drawn_and_planned() -> None:
    """Together with the smallest ones, which gives the largest quotients."""
    costs = sl.Costs(
        forward=[1e60, 1e-60], message=1e60, links=sl.Link(1e60, 1e-60), activation=1e60
    )
    schedule = sl.build_schedule("1f1b", num_ranks=2, num_microbatches=4)
    timeline = sl.simulate(schedule, costs)
    assert 0 < timeline.makespan < float("inf")
    assert "makespan" in str(timeline)


WRONG_VALUES: tuple[Any, ...] = (None, 3, 1.5, "x", b"x", [], [None], {}, object(), float("nan"))
SCHEDULE = sl.build_schedule("1f1b", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: type(value).__name__)
def test_a_value_of_a_wrong_type_is_an_error_where_it_is_passed(value: Any) -> None:
    def unless(*valid: object, other: Any = None) -> Any:
        """Return the value, or another one if it would be valid."""
        return other if any(value == each for each in valid) else value

    calls: list[Callable[[], object]] = [
        lambda: sl.check(value),
        lambda: sl.simulate(value),
        lambda: sl.lower(value),
        lambda: sl.Schedule(unless([], {}), (0,)),
        lambda: sl.Schedule(SCHEDULE.actions, unless([], {})),
        lambda: sl.Schedule.from_text(unless("x")),
        lambda: sl.Schedule.from_csv(value),
        lambda: sl.build_schedule(value, num_ranks=2, num_microbatches=2),
        lambda: sl.build_schedule("1f1b", num_ranks=unless(3), num_microbatches=2),
        lambda: sl.Costs(forward=unless(3, 1.5, [])),
        lambda: sl.Costs(links=unless({})),
        lambda: sl.Link(latency=unless(3, 1.5)),
        lambda: sl.Link(bandwidth=unless(3, 1.5)),
        lambda: sl.Cluster(unless(3), "1GiB"),
        lambda: sl.Cluster(2, unless(3, 1.5, other="x")),
        lambda: sl.plan(value, CLUSTER, batch_size=4),
        lambda: sl.plan(PROFILE, value, batch_size=4),
        lambda: sl.plan(PROFILE, CLUSTER, batch_size=unless(3)),
        lambda: sl.plan(PROFILE, CLUSTER, batch_size=4, optimizer=value),
        lambda: sl.search_schedule(unless(3), 4),
        lambda: sl.Plan.load(value),
        lambda: sl.Profile.load(value),
        lambda: sl.Cluster.load(value),
    ]
    if value is not None:
        calls += [
            lambda: sl.simulate(SCHEDULE, value),
            lambda: sl.build_schedule("zbv", num_ranks=2, num_microbatches=2, costs=value),
            lambda: sl.search_schedule(2, 2, value),
        ]
    if value not in (None, [], {}):
        calls.append(lambda: sl.lower(SCHEDULE, value))
    for call in calls:
        refused_in_a_second(call)


def test_invalid_actions_are_an_error() -> None:
    forward, backward = SCHEDULE.actions[0][0], SCHEDULE.actions[0][2]

    def check(rows: Any, placement: Any = (0,)) -> None:
        sl.check(sl.Schedule(rows, placement))

    wrong: Any
    for wrong in ("0", None, 0.0, True):
        for action in (
            forward._replace(stage=wrong),
            forward._replace(microbatch=wrong),
            forward._replace(peer=wrong),
            forward._replace(version=wrong),
        ):
            refused_in_a_second(partial(check, [[action, backward]]), "integers")
    for wrong in ([["0F0"]], [[None]], [None], ["0F0"], [forward], [[(0, "F", 0)]]):
        refused_in_a_second(partial(check, wrong), "actions contains")
    for wrong in ((0, 5), (0, -1), (0, True), ("0", "1"), (0.0, 1.0)):
        refused_in_a_second(partial(check, SCHEDULE.actions, wrong))


def test_costs_without_numbers_are_an_error() -> None:
    class Odd:
        def tolist(self) -> object:
            raise RuntimeError("no")

        def __repr__(self) -> str:
            raise RuntimeError("never")

    refused_in_a_second(lambda: sl.Costs(forward=Odd()), "forward is a Odd")  # type: ignore[arg-type]
    meta: Any = torch.ones(2, device="meta")
    refused_in_a_second(lambda: sl.Costs(forward=meta), "which cannot be converted to numbers")
    refused_in_a_second(lambda: sl.Costs().per_stage("speed", 2), "'speed' is not known")
    refused_in_a_second(lambda: sl.Costs.of_a_rank(1, speed=2), "'speed' was given")


def test_arguments_are_checked_against_annotations() -> None:
    def draw(
        sizes: tuple[int, ...] = (), scale: float = 1.0, names: dict[str, int] | None = None
    ) -> None:
        check_arguments(draw, locals())

    draw((1, 2), 3, {"a": 1})
    for wrong in ({"sizes": [1]}, {"sizes": (1, "2")}, {"scale": True}, {"names": {"a": "b"}}):
        given: Any = wrong
        with pytest.raises(sl.ScheduleError, match="but has to be"):
            draw(**given)


def test_a_value_in_an_error_is_short() -> None:
    values = ("x" * 10**6, [0] * 10**6, {1: "y" * 500}, b"z" * 1000, 10**6000, -(10**6000))
    assert all(len(shown(value)) < 120 for value in values)


@pytest.mark.parametrize(
    "words",
    [
        ["draw", "1f1b", "-p", "100000000000"],
        ["draw", "zbv", "-m", "100000000000000"],
        ["simulate", "interleaved_1f1b", "-v", "100000000000"],
        ["simulate", "pipedream", "--num-minibatches", "1000000000000"],
        ["simulate", "hanayo", "-v", "9" * 4000],
        ["draw", "zb_1p", "-p", "9" * 4000],
        ["draw", "1f1b", "--forward", "1e308"],
        ["draw", "1f1b", "--transfer", "9" * 5000],
        ["draw", "zb_2p", "--memory-limit", "9" * 5000],
        ["run", "--num-processes", "100000000000", __file__],
        ["run", "--max-restarts", "-1", __file__],
        ["plan", "x.json", "--num-devices", "1000000000", "--memory", "1GiB", "--batch-size", "4"],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_the_command_line_has_the_same_limits(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["stageline", *words])
    start = time.process_time()
    with pytest.raises(SystemExit) as stop:
        main()
    assert time.process_time() - start < 1.5  # with an import, and typer's own work
    assert stop.value.code == BAD_INPUT
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
