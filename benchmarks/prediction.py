"""What the planner expects of a step, in time and memory, and what the step takes: two ranks.

    python benchmarks/prediction.py                       all rows, about a quarter of an hour
    python benchmarks/prediction.py --model perceptron    one model
    python benchmarks/prediction.py --steps 20

Nine models, each profiled once with both cores at work; three of them with four schedules each, two
with what those leave out, and four that were chosen before they were measured. Each row is the best
plan of its schedule, with micro-batches of any size. A time is from the call of `step`, on threads,
to its return. The plans of a model run in turns, three times each, and the model is profiled once
more at the end, to show how much the machine's own speed has changed meanwhile. Memory is that of
processes, rank by rank (peaks.py). Nothing else should run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import stageline as sl
from stageline.model.workload import Workload
from stageline.report.timeline import Timeline
from stageline.zoo.workloads import ALL_WORKLOADS, UNSEEN_WORKLOADS, WORKLOADS, profile_workload

RANKS = 2
ROUNDS, WARM_UP_STEPS = 3, 2
FREED_AT_ONCE = {  # the environment in which glibc keeps nothing for later
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
ALIKE = 5.0  # percent; rows of a model that differ by more must be predicted in their order


class Configuration(NamedTuple):
    """A model, a schedule, and the memory of each rank."""

    model: str
    schedule: str
    memory: tuple[str, ...] = ("8GiB",) * RANKS

    def plan(self, profile: sl.Profile, batch_size: int) -> sl.Plan:
        devices = tuple(sl.Device(memory) for memory in self.memory)
        return sl.plan(
            profile,
            sl.Cluster(num_devices=RANKS, devices=devices),
            batch_size=batch_size,
            num_ranks=RANKS,
            optimizer="sgd",
            schedules=[self.schedule],
        )


CONFIGURATIONS = (
    *(Configuration(model, schedule) for model in WORKLOADS for schedule in SCHEDULES),
    Configuration("gpt", "zbv"),
    # the second rank lacks memory, so that its stage is recomputed
    Configuration("gpt, large head", "gpipe", ("8GiB", "45MB")),
    Configuration("narrow gpt", "1f1b"),
    Configuration("u-net", "1f1b"),
    *(
        Configuration(model, schedule)
        for model, schedule in zip(
            UNSEEN_WORKLOADS, ("1f1b", "interleaved_1f1b", "zb_h1", "gpipe"), strict=True
        )
    ),
)


class Row(NamedTuple):
    """One plan, what its steps took, and what its ranks held."""

    model: str
    plan: sl.Plan
    milliseconds: float
    timelines: list[Timeline]
    peaks: list[int]  # bytes, by rank

    @property
    def predicted(self) -> float:
        return 1e3 * self.plan.chosen.seconds

    @property
    def off(self) -> float:
        """Percent by which a step was expected to take longer."""
        return 100 * (self.predicted / self.milliseconds - 1)

    @property
    def memory_off(self) -> list[float]:
        """By rank, percent by which it was expected to hold more."""
        pairs = zip(self.plan.peak_memory, self.peaks, strict=True)
        return [100 * (expected / found - 1) for expected, found in pairs]


class Measured(NamedTuple):
    """Steps of a plan, in milliseconds."""

    times: list[float]
    timelines: list[Timeline]


def measure(case: Workload, plan: sl.Plan, steps: int) -> Measured:
    found = Measured([], [])
    with sl.Pipeline(case.model, case.loss_fn, plan=plan) as pipe:
        for _ in range(WARM_UP_STEPS + steps):
            with pipe.trace() as trace:
                start = perf_counter()
                float(pipe.step(case.inputs, case.target).loss)
                found.times.append(1e3 * (perf_counter() - start))
            found.timelines.append(trace.timeline)
    return Measured(found.times[WARM_UP_STEPS:], found.timelines[WARM_UP_STEPS:])


def peaks(model: str, plan: sl.Plan) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        worker = Path(__file__).with_name("peaks.py")
        command = [sys.executable, "-m", "stageline", "run", "--num-processes", str(RANKS)]
        ended = subprocess.run(
            [*command, str(worker), model, str(path)],
            env=os.environ | FREED_AT_ONCE,
            stdout=subprocess.PIPE,
            check=True,
            timeout=300,
        )
    found: list[int] = json.loads(ended.stdout)
    return found


def rows_of(model: str, steps: int) -> tuple[list[Row], float]:
    """Return the rows of a model, and the percent by which layers became slower meanwhile."""
    case = ALL_WORKLOADS[model]()
    profile = profile_workload(case, RANKS)
    chosen = [each for each in CONFIGURATIONS if each.model == model]
    plans = [each.plan(profile, len(case.inputs)) for each in chosen]
    rounds = [[measure(case, plan, -(-steps // ROUNDS)) for plan in plans] for _ in range(ROUNDS)]
    again = profile_workload(case, RANKS, repeats=3)
    rows = []
    for plan, found in zip(plans, zip(*rounds, strict=True), strict=True):
        milliseconds = median(time for each in found for time in each.times)
        timelines = [timeline for each in found for timeline in each.timelines]
        rows.append(Row(model, plan, milliseconds, timelines, peaks(model, plan)))
    return rows, 100 * (layer_seconds(again) / layer_seconds(profile) - 1)


def layer_seconds(profile: sl.Profile) -> float:
    return sum(layer.time for each in profile.measurements for layer in each.layers)


def misordered(rows: Iterable[Row]) -> tuple[int, list[tuple[Row, Row]]]:
    """Return how many pairs of a model's rows differ clearly, and those predicted in reverse."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if a.model == b.model]
    clear = [
        (a, b)
        for a, b in pairs
        if max(a.milliseconds, b.milliseconds)
        > (1 + ALIKE / 100) * min(a.milliseconds, b.milliseconds)
    ]
    return len(clear), [
        (a, b) for a, b in clear if (a.milliseconds < b.milliseconds) != (a.predicted < b.predicted)
    ]


def name_of(plan: sl.Plan) -> str:
    recomputed = ", recomputed" if any(plan.recompute) else ""
    return f"{plan.chosen.schedule}{recomputed}"


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, how far off predictions are, and whether they rank plans as measured."""
    table = Table(box=None, header_style="bold")
    names = ("predicted, ms", "measured, ms", "off, %", "MB by rank", "measured, MB", "off, %")
    for column in ("model", "schedule", "m", *names):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            name_of(row.plan),
            str(row.plan.chosen.num_microbatches),
            f"{row.predicted:.1f}",
            f"{row.milliseconds:.1f}",
            f"{row.off:+.1f}",
            ", ".join(f"{size / 1e6:.1f}" for size in row.plan.peak_memory),
            ", ".join(f"{size / 1e6:.1f}" for size in row.peaks),
            ", ".join(f"{off:+.1f}" for off in row.memory_off),
        )
    console.print(table)
    times = [abs(row.off) for row in rows]
    memory = [abs(off) for row in rows for off in row.memory_off]
    for what, sizes in (("step time", times), ("peak memory", memory)):
        print(f"{what}: off by {median(sizes):.1f} % in the median, {max(sizes):.1f} % at worst")
    count, wrong = misordered(rows)
    print(f"{count} pairs of a model's rows differ by more than {ALIKE:g} %: ", end="")
    print(f"{count - len(wrong)} are ranked as measured, {len(wrong)} are not")
    for a, b in wrong:
        print(f"  {a.model}: {name_of(a.plan)} and {name_of(b.plan)} are not")


def main(
    steps: Annotated[int, typer.Option(help="Steps of each that are measured.")] = 12,
    model: Annotated[str, typer.Option(help="Only this model.")] = "",
) -> None:
    """Print expected and measured times and peaks, and what explains the difference."""
    torch.set_num_threads(1)
    console, rows = Console(width=150), list[Row]()
    models = [name for name in ALL_WORKLOADS if model in ("", name)]
    for name in track(models, "predicting and measuring"):
        found, slower = rows_of(name, steps)
        rows += found
        for row in found:
            why = sl.explain(row.plan, row.timelines)
            console.print(f"{row.model}, {name_of(row.plan)}: {why}", highlight=False)
        print(f"{name}: layers took {slower:+.1f} % when profiled again at the end")
    show(rows, console)


if __name__ == "__main__":
    typer.run(main)
