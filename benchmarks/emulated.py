"""What the runtime costs: emulated accelerators, measured makespan over simulated.

Every stage is one layer that occupies its rank for F forward, F for the gradient of its input and F
for that of its weight. What a step takes beyond the simulated makespan is the runtime's own: ranks
are threads that share one interpreter.

    python benchmarks/emulated.py             all rows, about a minute
    python benchmarks/emulated.py --steps 9   medians of more steps
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import stageline as sl
from stageline.zoo.emulated import Occupy

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")


class Row(NamedTuple):
    """F in seconds, ranks, and the ratio that is wanted at most."""

    forward: float
    num_ranks: int
    limit: float


ROWS = (Row(0.010, 2, 1.04), Row(0.010, 4, 1.04), Row(0.010, 8, 1.04), Row(0.002, 8, 1.12))


def ratios(row: Row, name: str, steps: int) -> list[float]:
    """Of each step; one more goes before them to warm up."""
    num_microbatches = 4 * row.num_ranks
    schedule = sl.build_schedule(name, num_ranks=row.num_ranks, num_microbatches=num_microbatches)
    time = row.forward
    layers = (Occupy(time, time, time) for _ in range(schedule.num_stages))
    pipe = sl.Pipeline(
        nn.Sequential(*layers),
        _mean,
        num_ranks=row.num_ranks,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    simulated = sl.simulate(schedule, sl.Costs(time, time, time)).makespan
    batch = torch.ones(num_microbatches, 1), torch.ones(num_microbatches, 1)
    taken = []
    for _ in range(steps + 1):
        start = perf_counter()
        pipe.step(*batch)
        taken.append(perf_counter() - start)
    pipe.close()
    return [seconds / simulated for seconds in taken[1:]]


def _mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def main(
    steps: Annotated[int, typer.Option(help="Steps that are measured for each row.")] = 5,
) -> None:
    """Print measured over simulated makespan for each schedule."""
    torch.set_num_threads(1)
    table = Table(box=None, header_style="bold")
    for column in ("F, ms", "ranks", *SCHEDULES, "wanted"):
        table.add_column(column, justify="right")
    cases = [(row, name) for row in ROWS for name in SCHEDULES]
    found = {case: ratios(*case, steps) for case in track(cases, "emulated accelerators")}
    for row in ROWS:
        cells = (
            f"{median(found[row, name]):.3f} ({min(found[row, name]):.3f})" for name in SCHEDULES
        )
        table.add_row(f"{1e3 * row.forward:g}", str(row.num_ranks), *cells, f"≤ {row.limit}")
    Console(width=120).print("measured makespan over simulated: median (least)", table)


if __name__ == "__main__":
    typer.run(main)
