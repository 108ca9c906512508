"""One rank of a schedule on emulated layers: its throughput and its memory, for schedules.py.

stageline run --num-processes 4 experiments/tables/worker.py TITLE STEPS PATH
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

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


class Found(NamedTuple):
    """What a rank found: of each step or stream, and of all of them."""

    rates: list[float]  # micro-batches per second
    update_ms: float  # median of the optimizers' steps
    peak: int  # bytes of this rank


def run(variant: Variant, steps: int) -> Found:
    count = variant.num_microbatches
    model = nn.Sequential(
        *(Block(schedules.SECONDS, schedules.FLOATS) for _ in range(schedules.LAYERS))
    )
    batch = torch.zeros(count, 1, 1), torch.zeros(count, 1)  # the first layer widens it
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is now
    with pipeline(model, variant) as pipe:
        traced = [trace_once(pipe, batch, variant) for _ in range(steps + 1)][1:]
        own = sum(parameter.nbytes for parameter in pipe.parameters())  # there before
        peak = status("VmHWM") - before + own
    updates = [
        span.end - span.start
        for timeline, _ in traced
        for row in timeline.spans
        for span in row
        if span.action.kind is sl.Kind.STEP
    ]
    return Found([rate for _, rate in traced], median(updates), peak)


def pipeline(model: nn.Sequential, variant: Variant) -> sl.Pipeline:
    num_stages = schedules.schedule_of(variant).num_stages
    return sl.Pipeline(
        model,
        mean,
        num_ranks=schedules.RANKS,
        num_microbatches=variant.num_microbatches,
        schedule=variant.schedule,
        balance=[schedules.LAYERS // num_stages] * num_stages,
        recompute=variant.recompute,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=1e-9, momentum=0.9),
    )


def trace_once(pipe: sl.Pipeline, batch: Any, variant: Variant) -> tuple[sl.Timeline, float]:
    """Return the timeline of a step or a stream, and micro-batches per second."""
    start = perf_counter()
    with pipe.trace() as trace:
        if variant.is_asynchronous:
            for _ in pipe.run([batch] * variant.num_minibatches):
                pass
        else:
            float(pipe.step(*batch).loss)
            seconds = perf_counter() - start
    if variant.is_asynchronous:
        return trace.timeline, 1e3 * schedules.stream_rate(trace.timeline, variant)
    return trace.timeline, variant.num_microbatches / seconds


def main(title: str, steps: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    variant = schedules.BY_TITLE[title]
    run(variant, 1)  # what libraries keep for themselves is there from now on
    rates, update, peak = run(variant, int(steps))
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    if dist.get_rank() == 0:
        found = {"rates": rates, "update_ms": update, "peaks": peaks}
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
