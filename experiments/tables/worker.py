"""One rank of a schedule on emulated layers: its throughput and its memory, for schedules.py.

stageline run --num-processes 4 experiments/tables/worker.py TITLE STEPS PATH
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from experiments.tables import schedules
from experiments.tables.schedules import Block, Variant


def status(key: str) -> int:
    """Return a figure of this process from the operating system, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def run(variant: Variant, steps: int) -> tuple[list[float], int]:
    """Return micro-batches per second of each step or stream, and this rank's peak in bytes."""
    count = variant.num_microbatches
    model = nn.Sequential(
        *(Block(schedules.SECONDS, schedules.FLOATS) for _ in range(schedules.LAYERS))
    )
    batch = torch.zeros(count, 1, 1), torch.zeros(count, 1)  # the first layer widens it
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is now
    num_stages = schedules.schedule_of(variant).num_stages
    pipe = sl.Pipeline(
        model,
        mean,
        num_ranks=schedules.RANKS,
        num_microbatches=count,
        schedule=variant.schedule,
        balance=[schedules.LAYERS // num_stages] * num_stages,
        recompute=variant.recompute,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=1e-9, momentum=0.9),
    )
    rates = [rate(pipe, batch, variant) for _ in range(steps + 1)][1:]
    own = sum(parameter.nbytes for parameter in pipe.parameters())  # there before it was measured
    peak = status("VmHWM") - before + own
    pipe.close()
    return rates, peak


def rate(pipe: sl.Pipeline, batch: Any, variant: Variant) -> float:
    if variant.is_asynchronous:
        with pipe.trace() as trace:
            for _ in pipe.run([batch] * variant.num_minibatches):
                pass
        return 1e3 * schedules.stream_rate(trace.timeline, variant)
    start = perf_counter()
    float(pipe.step(*batch).loss)
    return variant.num_microbatches / (perf_counter() - start)


def main(title: str, steps: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    variant = schedules.BY_TITLE[title]
    run(variant, 1)  # what libraries keep for themselves is there from now on
    rates, peak = run(variant, int(steps))
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, peak)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps({"rates": rates, "peaks": found}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
