"""What the planner expects of a step, and what the step takes: two ranks on two cores.

    python benchmarks/prediction.py             all rows, about three minutes
    python benchmarks/prediction.py --steps 20

Three models, each profiled once with both cores at work; for each four plans: the best one of a
schedule, with micro-batches of any size. Nothing else should run meanwhile.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import stageline as sl
from stageline.report.timeline import Timeline
from stageline.verification import Case
from stageline.zoo.for_planning import CASES

RANKS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")


def measured(case: Case, plan: sl.Plan, steps: int) -> list[Timeline]:
    pipe = sl.Pipeline(case.model, case.loss_fn, plan=plan)
    timelines = []
    for _ in range(steps + 2):
        with pipe.trace() as timeline:
            pipe.step(case.inputs, case.target)
        timelines.append(timeline)
    pipe.close()
    return timelines[2:]


def rows(steps: int) -> list[tuple[Any, ...]]:
    found = []
    cluster = sl.Cluster(num_devices=RANKS, memory="8GiB")
    for name in track(CASES, "predicting and measuring"):
        case = CASES[name]()
        size = len(case.inputs)
        sizes = [size // 16, size // 8, size // 4, size // 2]
        profile = sl.profile(
            case.model,
            case.inputs,
            loss_fn=case.loss_fn,
            target=case.target,
            sizes=sizes,
            ranks=RANKS,
        )
        for schedule in SCHEDULES:
            plan = sl.plan(profile, cluster, batch_size=size, num_ranks=RANKS, schedules=[schedule])
            timelines = measured(case, plan, steps)
            took = median(timeline.makespan for timeline in timelines)
            found.append((name, plan, took, sl.explain(plan, timelines)))
    return found


def main(
    steps: Annotated[int, typer.Option(help="Steps of each that are measured.")] = 11,
) -> None:
    """Print expected and measured times, and what explains the difference."""
    torch.set_num_threads(1)
    table = Table(box=None, header_style="bold")
    for column in ("model", "schedule", "m", "predicted, ms", "measured, ms", "off, %"):
        table.add_column(column, justify="right")
    apart = []
    console = Console(width=140)
    for name, plan, took, why in rows(steps):
        expected = plan.timeline.makespan
        apart.append(100 * (expected / took - 1))
        cells = (f"{expected:.1f}", f"{took:.1f}", f"{apart[-1]:+.1f}")
        table.add_row(name, plan.chosen.schedule, str(plan.chosen.num_microbatches), *cells)
        console.print(f"{name}, {plan.chosen.schedule}: {why}", highlight=False)
    console.print(table)
    sizes = sorted(map(abs, apart))
    print(f"off by {median(sizes):.1f} % in the median, {sizes[-1]:.1f} % at worst")


if __name__ == "__main__":
    typer.run(main)
