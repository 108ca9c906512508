"""What recomputation costs in time and saves in memory: never, selective and always.

    python benchmarks/recomputation.py                     all models, about three minutes
    python benchmarks/recomputation.py --model resnet      one model

GPipe on one rank with eight micro-batches, so that everything is kept for as long as it can be. The
three ways take turns in one process, at least 15 rounds; a time is the median of ratios within a
round. Memory is what a process holds at most above what it held before its steps, one process for
each way, with a glibc that gives back at once what is freed. Nothing else should run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import stageline as sl
from stageline.model.workload import Workload
from stageline.zoo import gpt
from stageline.zoo.amoebanet import amoebanet_d
from stageline.zoo.resnet import resnet

MODES = ("never", "selective", "always")
NUM_MICROBATCHES, WARM_UP_STEPS = 8, 2
MIB = 2**20
# glibc keeps nothing for later
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0"}


def wide_gpt() -> Workload:
    """Return four blocks of width 512, on 128 tokens."""
    model = gpt.gpt(vocabulary=97, width=512, heads=8, blocks=4, context=128, dropout=0.1)
    tokens = torch.randint(0, 97, (NUM_MICROBATCHES, 128))
    return Workload(model, gpt.loss, tokens, tokens)


def images(model: sl.LayerSequence | nn.Module, size: int) -> Workload:
    x = torch.randn(2 * NUM_MICROBATCHES, 3, size, size)
    y = torch.randint(0, 10, (2 * NUM_MICROBATCHES,))
    return Workload(model, nn.functional.cross_entropy, x, y)


MODELS: dict[str, Callable[[], Workload]] = {
    "gpt": wide_gpt,
    "resnet": lambda: images(resnet(channels=3, classes=10, width=64, blocks=[2, 2, 2]), 32),
    "amoebanet": lambda: images(amoebanet_d(10, 3, 64), 96),
}


def pipeline(name: str, mode: str) -> tuple[sl.Pipeline, Workload]:
    torch.manual_seed(0)
    case = MODELS[name]()
    pipe = sl.Pipeline(
        case.model,
        case.loss_fn,
        num_ranks=1,
        num_microbatches=NUM_MICROBATCHES,
        schedule="gpipe",
        backend="serial",
        recompute=mode,
    )
    return pipe, case


def step(pipe: sl.Pipeline, case: Workload) -> float:
    """Return the seconds of one step."""
    pipe.zero_grad()
    start = perf_counter()
    pipe.step(case.inputs, case.target)
    return perf_counter() - start


def ratios(name: str, rounds: int) -> dict[str, float]:
    """Return what a step takes in each mode, over a step of the same round that keeps all."""
    pipes = {mode: pipeline(name, mode) for mode in MODES}
    for each in pipes.values():
        for _ in range(WARM_UP_STEPS):
            step(*each)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        turn = number % len(MODES)
        for mode in (*MODES[turn:], *MODES[:turn]):
            times[mode].append(step(*pipes[mode]))
    for pipe, _ in pipes.values():
        pipe.close()
    return {
        mode: median(a / b for a, b in zip(times[mode], times["never"], strict=True))
        for mode in MODES
    }


def status(key: str) -> int:
    """Return a number of bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def peak(name: str, mode: str) -> int:
    """Return what this process holds at most during steps, above what it held before."""
    pipe, case = pipeline(name, mode)
    step(pipe, case)  # what libraries keep for themselves, and gradients, are there from now on
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is now
    for _ in range(WARM_UP_STEPS):
        pipe.step(case.inputs, case.target)
    return status("VmHWM") - before


def peak_of_a_process(name: str, mode: str) -> int:
    command = [sys.executable, __file__, "--model", name, "--peak", mode]
    found = subprocess.run(
        command, env={**os.environ, **FREED_AT_ONCE}, capture_output=True, text=True, check=True
    )
    return int(json.loads(found.stdout))


def main(
    model: Annotated[
        str, typer.Option(help="One of gpt, resnet and amoebanet; all if empty.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Steps of each way.", min=3)] = 15,
    peak_mode: Annotated[str, typer.Option("--peak", hidden=True)] = "",
) -> None:
    """Print the time and memory of a step that recomputes nothing, cheap results, or everything."""
    torch.set_num_threads(1)
    if peak_mode:
        print(peak(model, peak_mode))
        return
    table = Table("model", "recompute", "time of a step", "peak, MiB", box=None)
    for name in track([model] if model else list(MODELS), "measuring"):
        times = ratios(name, rounds)
        for mode in MODES:
            memory = peak_of_a_process(name, mode) / MIB
            table.add_row(name, mode, f"{times[mode]:.3f}", f"{memory:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
