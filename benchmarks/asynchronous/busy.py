"""How busy ranks are: PipeDream's stream and 1f1b with a flush, on emulated accelerators.

    python benchmarks/asynchronous/busy.py                    about a minute and a half
    python benchmarks/asynchronous/busy.py --time 10          F, I and W in ms
    python benchmarks/asynchronous/busy.py --backend serial   what it is with no overlap at all

Four ranks, 32 mini-batches of four micro-batches; a stage is one layer that sleeps for its times.
Ranks are threads of one interpreter, and wait for whatever else the machine does: run it alone, or
the figures drop. Times are wrong then too: a sleep is shortened by how late it usually ends.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD

import stageline as sl
from stageline.report.timeline import Timeline
from stageline.schedules.program.stream import as_stream
from stageline.zoo.emulated import Occupy

RANKS, MICROBATCHES, MINIBATCHES = 4, 4, 32
SCHEDULES = ("pipedream", "1f1b")
WANTED = 0.97  # of pipedream, between fill and drain
HERE = Path(__file__).parent


def simulated(name: str, milliseconds: float) -> Timeline:
    if name == "1f1b":
        flushed = sl.build_schedule(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
        schedule = as_stream(flushed, MINIBATCHES)
    else:
        schedule = sl.build_schedule(
            name,
            num_ranks=RANKS,
            num_microbatches=MICROBATCHES,
            num_minibatches=MINIBATCHES,
        )
    return sl.simulate(schedule, sl.Costs(milliseconds, milliseconds, milliseconds))


def measured(name: str, milliseconds: float, backend: str, runs: int) -> list[Timeline]:
    """Of each run; a shorter one goes before them to warm up."""
    seconds = milliseconds / 1e3
    pipe = sl.Pipeline(
        nn.Sequential(*(Occupy(seconds, seconds, seconds) for _ in range(RANKS))),
        _mean,
        num_ranks=RANKS,
        num_microbatches=MICROBATCHES,
        schedule=name,
        backend=backend,
        optimizer_fn=lambda parameters: SGD(parameters, 0.0),
    )
    batch = torch.ones(MICROBATCHES, 1), torch.ones(MICROBATCHES, 1)
    timelines = []
    with closing(pipe):
        list(pipe.run([batch] * 4))
        for _ in range(runs):
            with pipe.trace() as trace:
                list(pipe.run([batch] * MINIBATCHES))
            timeline = trace.timeline
            timelines.append(timeline)
    return timelines


def _mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def steady(timeline: Timeline) -> list[float]:
    """By rank, between fill and drain."""
    return list(timeline.steady_busy)


def whole(timeline: Timeline) -> list[float]:
    """By rank, from the first action to the last of all."""
    return [busy / timeline.makespan for busy in timeline.busy]


def percents(timelines: list[Timeline], share: str) -> list[str]:
    """The median over runs, for each rank."""
    of = {"between fill and drain": steady, "of the whole": whole}[share]
    by_rank = zip(*map(of, timelines), strict=True)
    return [f"{100 * median(shares):.1f}" for shares in by_rank]


def main(
    time: Annotated[float, typer.Option(help="Of a forward, and of each gradient, in ms.")] = 30.0,
    runs: Annotated[int, typer.Option(help="Of each schedule that are measured.")] = 5,
    backend: Annotated[str, typer.Option(help="threads or serial.")] = "threads",
    folder: Annotated[Path, typer.Option(help="For the measured timelines (SVG).")] = HERE,
) -> None:
    """Print how busy each rank is, simulated and measured, and draw what was measured."""
    torch.set_num_threads(1)
    table = Table(box=None, header_style="bold")
    for column in ("schedule", "busy, %"):
        table.add_column(column)
    for column in ("", *(f"rank {rank}" for rank in range(RANKS)), "makespan, ms"):
        table.add_column(column, justify="right")
    for name in track(SCHEDULES, "emulated accelerators"):
        expected, found = [simulated(name, time)], measured(name, time, backend, runs)
        for share in ("between fill and drain", "of the whole"):
            for words, timelines in (("simulated", expected), ("measured", found)):
                makespan = median(timeline.makespan for timeline in timelines)
                cells = (*percents(timelines, share), f"{makespan:.0f}")
                table.add_row(name, share, words, *cells)
        usual = sorted(found, key=lambda timeline: timeline.makespan)[len(found) // 2]
        usual.save(folder / f"busy_{name}.svg")
    wanted = f"wanted: pipedream ≥ {100 * WANTED:g} % between fill and drain"
    Console(width=120).print(table, wanted, highlight=False)


if __name__ == "__main__":
    typer.run(main)
