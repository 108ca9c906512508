"""What the runtime costs in processes: emulated accelerators, beside torch's own pipelining.

    stageline run --num-processes 2 benchmarks/processes.py
    stageline run --num-processes 4 benchmarks/processes.py
    stageline run --num-processes 8 benchmarks/processes.py

Every rank is a process, every stage a layer that occupies it for F forward and 2F backward. Prints
measured over simulated makespan; steps of both libraries take turns, so both have the same weather.
Each order is simulated as it is run: torch's ZB-V is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import pipelining

import stageline as sl
from stageline.zoo.emulated import Occupy

FORWARDS = (0.010, 0.002)  # seconds
TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Contestant(NamedTuple):
    """One step of it, and what it should take."""

    step: Callable[[], object]
    simulated: float
    close: Callable[[], object]


def ours(name: str, forward: float) -> Contestant:
    num_ranks = dist.get_world_size()
    schedule = sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=4 * num_ranks)
    pipe = sl.Pipeline(
        nn.Sequential(*_layers(schedule.num_stages, forward)),
        _mean,
        num_ranks=num_ranks,
        num_microbatches=4 * num_ranks,
        schedule=schedule,
    )
    x = _batch()
    return Contestant(lambda: pipe.step(x, x), _simulated(schedule, forward), pipe.close)


def torchs(name: str, forward: float) -> Contestant:
    """The stages of this rank by the placement of our schedule of that name, which is the same."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=4 * num_ranks)
    layers = _layers(shape.num_stages, forward)
    stages = [
        pipelining.PipelineStage(layers[stage], stage, shape.num_stages, torch.device("cpu"))
        for stage, home in enumerate(shape.placement)
        if home == rank
    ]
    is_alone = shape.num_stages == num_ranks
    schedule: Any = TORCH[name](
        stages[0] if is_alone else stages,
        4 * num_ranks,
        loss_fn=_mean,
        scale_grads=False,
    )
    order = shape if is_alone else _order(schedule, shape)
    x = _batch()
    inputs = [x] if shape.placement[0] == rank else []
    target = {"target": x} if shape.placement[-1] == rank else {}
    return Contestant(
        lambda: schedule.step(*inputs, **target), _simulated(order, forward), lambda: None
    )


def _order(schedule: Any, shape: sl.Schedule) -> sl.Schedule:
    """The one that torch runs."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        schedule._dump_csv(str(path), "compute_only")  # noqa: SLF001  it has no other way out
        found = sl.Schedule.from_csv(path)
    assert found.placement == shape.placement
    return found


def _layers(count: int, forward: float) -> list[Occupy]:
    return [Occupy(forward, forward, forward) for _ in range(count)]


def _batch() -> Tensor:
    return torch.ones(4 * dist.get_world_size(), 1)


def _simulated(schedule: sl.Schedule, forward: float) -> float:
    return sl.simulate(schedule, sl.Costs(forward, forward, forward)).makespan


def _mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def ratios(contestants: list[Contestant], steps: int) -> list[float]:
    """Medians; a step's time is that of the slowest rank, from when all were ready."""
    taken: list[list[float]] = [[] for _ in contestants]
    for _ in range(steps + 1):
        for contestant, times in zip(contestants, taken, strict=True):
            dist.barrier()
            start = perf_counter()
            contestant.step()
            slowest = torch.tensor(perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(float(slowest))
    for contestant in contestants:
        contestant.close()
    return [median(t[1:]) / c.simulated for t, c in zip(taken, contestants, strict=True)]


def main(
    steps: Annotated[int, typer.Option(help="Steps of each that are measured.")] = 9,
) -> None:
    """Print measured over simulated makespan for Stageline and for torch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(width=100, quiet=dist.get_rank() != 0)
    table = Table(box=None, header_style="bold")
    for column in ("ranks", "F, ms", "schedule", "stageline", "torch"):
        table.add_column(column, justify="right")
    with console.status("") as status:
        for forward in FORWARDS:
            for name in TORCH:
                status.update(f"{name}, F = {1e3 * forward:g} ms")
                found = ratios([make(name, forward) for make in (ours, torchs)], steps)
                cells = (f"{ratio:.3f}" for ratio in found)
                table.add_row(str(dist.get_world_size()), f"{1e3 * forward:g}", name, *cells)
    console.print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
