"""Sums of gradients over two replicas of one machine: through shared memory, and over gloo.

    stageline run --num-processes 2 benchmarks/replica_sums.py

Prints for each what a step takes, with a model that has many weights and little to compute. With
MALLOC_MMAP_THRESHOLD_=4096 MALLOC_TRIM_THRESHOLD_=0 MALLOC_TOP_PAD_=0 in the environment, in which
glibc keeps nothing for later, also its peak of memory above the weights and gradients.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stageline as sl

WIDTH, LAYERS, SAMPLES = 1024, 18, 2
WARM_UP, STEPS = 3, 15


class Sum(NamedTuple):
    """The seconds of a step in the median, and bytes at its peak."""

    seconds: float
    peak: int


def measured(*, shared_memory: bool) -> Sum:
    """Train for some steps with two replicas of a pipeline of one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    pipe = sl.Pipeline(
        model,
        nn.functional.mse_loss,
        num_ranks=1,
        num_microbatches=1,
        mesh=mesh,
        options=sl.Options(shared_memory=shared_memory),
    )
    x = torch.randn(SAMPLES, WIDTH)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is now
    taken = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        start = perf_counter()
        pipe.step(x, x)
        taken.append(perf_counter() - start)
        model.zero_grad()
    peak = status("VmHWM") - before
    pipe.close()
    return Sum(median(taken[WARM_UP:]), peak)


def status(key: str) -> int:
    """Return a figure of this process from the operating system, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradients = 4 * LAYERS * WIDTH * (WIDTH + 1)
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    console.print(f"{gradients / 1e6:.0f} MB of gradients, {dist.get_world_size()} replicas")
    measured(shared_memory=True)  # what libraries keep for themselves is there from then on
    has_peaks = os.environ.get("MALLOC_TRIM_THRESHOLD_") == "0"
    for name, shared in (("shared memory", True), ("gloo", False)) * 2:
        found = measured(shared_memory=shared)
        peak = f", {(found.peak - gradients) / 1e6:4.0f} MB beside gradients" if has_peaks else ""
        console.print(f"{name:15} {1e3 * found.seconds:6.1f} ms{peak}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
