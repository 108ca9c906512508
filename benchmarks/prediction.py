"""What the planner expects of a step, in time and memory, and what the step takes: two ranks.

    python benchmarks/prediction.py             all rows, about three minutes
    python benchmarks/prediction.py --steps 20

Three models, each profiled once with both cores at work; for each four plans: the best one of a
schedule, with micro-batches of any size. Times are of threads; memory is that of processes, rank by
rank (peaks.py). Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import stageline as sl
from stageline.model.workload import Workload
from stageline.report.timeline import Timeline
from stageline.zoo.workloads import WORKLOADS, profile_workload

RANKS = 2
FREED_AT_ONCE = {  # the environment in which glibc keeps nothing for later
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")


class Row(NamedTuple):
    """One plan, what its steps took, and what its ranks held."""

    model: str
    plan: sl.Plan
    timelines: list[Timeline]
    peaks: list[int]  # bytes, by rank

    @property
    def milliseconds(self) -> float:
        return median(timeline.makespan for timeline in self.timelines)

    @property
    def off(self) -> float:
        """Percent by which a step was expected to take longer."""
        return 100 * (self.plan.timeline.makespan / self.milliseconds - 1)

    @property
    def memory_off(self) -> list[float]:
        """By rank, percent by which it was expected to hold more."""
        pairs = zip(self.plan.peak_memory, self.peaks, strict=True)
        return [100 * (expected / found - 1) for expected, found in pairs]


def measured(case: Workload, plan: sl.Plan, steps: int) -> list[Timeline]:
    pipe = sl.Pipeline(case.model, case.loss_fn, plan=plan)
    timelines = []
    for _ in range(steps + 2):
        with pipe.trace() as trace:
            pipe.step(case.inputs, case.target)
        timeline = trace.timeline
        timelines.append(timeline)
    pipe.close()
    return timelines[2:]


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


def rows(steps: int) -> list[Row]:
    found = []
    cluster = sl.Cluster(num_devices=RANKS, memory="8GiB")
    for name in track(WORKLOADS, "predicting and measuring"):
        case = WORKLOADS[name]()
        size = len(case.inputs)
        profile = profile_workload(case, RANKS)
        given: dict[str, Any] = {"batch_size": size, "num_ranks": RANKS, "optimizer": "sgd"}
        for schedule in SCHEDULES:
            plan = sl.plan(profile, cluster, **given, schedules=[schedule])
            found.append(Row(name, plan, measured(case, plan, steps), peaks(name, plan)))
    return found


def main(
    steps: Annotated[int, typer.Option(help="Steps of each that are measured.")] = 11,
) -> None:
    """Print expected and measured times and peaks, and what explains the difference."""
    torch.set_num_threads(1)
    table = Table(box=None, header_style="bold")
    names = ("predicted, ms", "measured, ms", "off, %", "MB by rank", "measured, MB", "off, %")
    for column in ("model", "schedule", "m", *names):
        table.add_column(column, justify="right")
    console = Console(width=150)
    found = rows(steps)
    for row in found:
        expected = row.plan.timeline.makespan
        why = sl.explain(row.plan, row.timelines)
        console.print(f"{row.model}, {row.plan.chosen.schedule}: {why}", highlight=False)
        table.add_row(
            row.model,
            row.plan.chosen.schedule,
            str(row.plan.chosen.num_microbatches),
            f"{expected:.1f}",
            f"{row.milliseconds:.1f}",
            f"{row.off:+.1f}",
            ", ".join(f"{size / 1e6:.1f}" for size in row.plan.peak_memory),
            ", ".join(f"{size / 1e6:.1f}" for size in row.peaks),
            ", ".join(f"{off:+.1f}" for off in row.memory_off),
        )
    console.print(table)
    times = [abs(row.off) for row in found]
    memory = [abs(off) for row in found for off in row.memory_off]
    for what, sizes in (("step time", times), ("peak memory", memory)):
        print(f"{what}: off by {median(sizes):.1f} % in the median, {max(sizes):.1f} % at worst")


if __name__ == "__main__":
    typer.run(main)
