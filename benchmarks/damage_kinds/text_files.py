"""Valid files of every kind that Stageline reads, and functions that use them."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import stageline as sl
from stageline.planning.partition.pipedream import pipedream_partition
from stageline.planning.partition.pipedream_graph import read_graph, to_profile
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    TiedParameter,
    ValueCost,
)


def schedules() -> Iterator[str]:
    """Yield CSV files of schedules."""
    for name in sl.schedule_names():
        schedule = sl.build_schedule(name, num_ranks=3, num_microbatches=6)
        yield "\n".join(",".join(map(str, row)) for row in schedule.actions)
    replicated = sl.build_schedule("pipedream", num_ranks=3, num_microbatches=2, replicas=[2, 1])
    yield "\n".join(",".join(map(str, row)) for row in replicated.actions)
    yield "0F0,,0F1,(0B0;0F2)OVERLAP_F_B,0UNSHARD,0B1,0B2\n"


def programs() -> Iterator[str]:
    """Yield CSV files with sends, receives, reductions and steps."""
    for name in ("1f1b", "zbv", "pipedream"):
        program = sl.lower(sl.build_schedule(name, num_ranks=2, num_microbatches=2))
        yield "\n".join(",".join(map(str, row)) for row in program.actions)


def costs() -> Iterator[str]:
    yield json.dumps({"forward": 1.1, "input_grad": [1, 2.5, 1e-3], "transfer": 0.05})
    yield json.dumps({"links": {"latency": 0.5, "bandwidth": 1e9}, "message": [1e6, 2e6, 0]})
    yield json.dumps({"activation": 2e9, "retained": 1e9, "parameters": [4e9, 3e9, 5e9], "step": 1})
    yield json.dumps({"recompute": 1, "working_set": 2, "gradients": 3, "optimizer_state": 4})


def profile() -> Profile:
    layer = LayerCost(1e-3, 2e-3, 1e-3, 1000, 800, 4096, 16, 10, 1e-5, 1e-5, 64)
    twice = LayerCost(2e-3, 4e-3, 2e-3, 2000, 1600, 4096, 16, 20, 1e-5, 1e-5, 128)
    values = (ValueCost(-1, (0,), 64), ValueCost(0, (1, 2), 256, 32, (2,)), ValueCost(1, (2,), 256))
    sizes = (Measurement(1, (layer,) * 3, values), Measurement(2, (twice,) * 3, values))
    return Profile(("a", "b", "c"), sizes, (TiedParameter((0, 2), 4096),), "a device")


def cluster() -> sl.Cluster:
    return sl.Cluster(2, "1MiB", levels=(sl.Level("machine", 2, 1e9, 1e-5),), host_bandwidth=1e9)


def saved(*values: Any) -> Iterator[str]:
    """Yield each value as the text of its file."""
    with tempfile.TemporaryDirectory() as folder:
        for value in values:
            value.save(path := Path(folder) / "saved.json")
            yield path.read_text()


def plans() -> Iterator[str]:
    found = [
        sl.plan(profile(), cluster(), batch_size=4, schedules=[name])
        for name in ("1f1b", "zb_h1", "pipedream")
    ]
    yield from saved(*found)


def clusters() -> Iterator[str]:
    yield from saved(cluster(), sl.Cluster(2, devices=(sl.Device("1GiB"), sl.Device(2e9, 0.5))))


def graphs() -> Iterator[str]:
    path = Path(__file__).parents[2] / "tests" / "figures" / "vgg16.graph.txt"
    lines = path.read_text().splitlines()
    nodes, edges = ([x for x in lines if x[:1].isspace() == is_edge] for is_edge in (False, True))
    names = {line.split(" -- ")[0] for line in nodes[:8]}
    kept = [line for line in edges if {part.strip() for part in line.split(" -- ")} <= names]
    yield "\n".join(nodes[:8] + kept)
    costs = "forward_compute_time=0, backward_compute_time=0, parameter_size=0"
    yield f"node1 -- Input -- {costs}, activation_size=[1.0; 2.0] -- stage_id=0\n"


def command(*arguments: str) -> Callable[[Path], None]:
    """Return a function that runs the command line in process; FILE is the damaged file."""

    def call(path: Path) -> None:
        from stageline.cli import main  # noqa: PLC0415  a worker imports it once

        words = [str(path) if word == "FILE" else word for word in arguments]
        sys.argv = ["stageline", *words]
        output = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(output):
            try:
                main()
            except SystemExit as stop:
                code = stop.code or 0
        if code not in (0, 1, 2) or (code and not output.getvalue().strip()):
            raise AssertionError(f"exit code {code}, with the output {output.getvalue()!r}")
        if code == 2 and "error" not in output.getvalue().lower():
            raise AssertionError(f"not an error: {output.getvalue()!r}")
        if code:
            raise sl.StagelineError(output.getvalue())

    return call


def use_schedule(path: Path) -> None:
    schedule = sl.Schedule.from_csv(path)
    repr(schedule), str(schedule)
    sl.check(schedule)
    timeline = sl.simulate(schedule)
    str(timeline), timeline.peak_memory, timeline.lower_bound
    sl.check(sl.lower(schedule))
    timeline.save(path.with_suffix(".svg"))


def use_costs(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))  # as a user would
    costs = sl.Costs.of_a_rank(1, **values)
    for name in ("1f1b", "zb_1p"):
        schedule = sl.build_schedule(name, num_ranks=3, num_microbatches=4, costs=costs)
        str(sl.simulate(schedule, costs))


def use_profile(path: Path) -> None:
    found = sl.Profile.load(path)
    str(found)
    found.at(3)
    str(sl.plan(found, cluster(), batch_size=4, schedules=["1f1b", "gpipe"]))


def use_cluster(path: Path) -> None:
    found = sl.Cluster.load(path)
    str(found)
    str(sl.plan(profile(), found, batch_size=4, schedules=["1f1b", "gpipe"]))


def use_plan(path: Path) -> None:
    found = sl.Plan.load(path)
    str(found), str(found.timeline), found.throughput, found.recompute_modes
    found.save(path.with_suffix(".again"))


def use_graph(path: Path) -> None:
    graph = read_graph(path)
    pipedream_partition(graph, 4)
    str(to_profile(graph))


class Kind(NamedTuple):
    """Valid files of one kind, and the functions that use them."""

    suffix: str
    examples: Callable[[], Iterator[str]]
    uses: tuple[Callable[[Path], None], ...]


KINDS = {
    "schedule": Kind(
        ".csv", schedules, (use_schedule, command("simulate", "FILE"), command("draw", "FILE"))
    ),
    "program": Kind(".csv", programs, (use_schedule, command("draw", "FILE"))),
    "costs": Kind(
        ".json",
        costs,
        (
            use_costs,
            command("simulate", "1f1b", "-p", "3", "-m", "4", "--costs", "FILE"),
            command("draw", "zbv", "-p", "2", "-m", "4", "--costs", "FILE"),
            command("simulate", "gpipe", "interleaved_1f1b", "-p", "3", "--costs", "FILE"),
        ),
    ),
    "profile": Kind(
        ".json",
        lambda: saved(profile()),
        (
            use_profile,
            command(
                *("plan", "FILE", "--num-devices", "2", "--memory", "1MiB", "--batch-size", "4"),
                *("--schedule", "1f1b", "--save", "/dev/null"),
            ),
        ),
    ),
    "cluster": Kind(".json", clusters, (use_cluster,)),
    "plan": Kind(".json", plans, (use_plan,)),
    "graph": Kind(".txt", graphs, (use_graph,)),
}
