"""What each rank of a plan holds at most, as the operating system sees it: for prediction.py.

    stageline run --num-processes 2 benchmarks/peaks.py MODEL PLAN.json

Each rank is a process that makes only its own layers. It trains once before, so that what libraries
keep for themselves is there already; prediction.py starts it such that freed memory goes back.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import stageline as sl
from stageline.zoo.workloads import ALL_WORKLOADS


def status(key: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def fill(layer: sl.Layer) -> None:
    with torch.no_grad():
        for parameter in layer.module.parameters():
            parameter.normal_(0.0, 0.02)
        for buffer in layer.module.buffers():
            buffer.fill_(1)


def peak(name: str, plan: sl.Plan, steps: int = 3) -> int:
    build = ALL_WORKLOADS[name]
    sample = build()
    inputs, target = sample.inputs.clone(), sample.target.clone()
    del sample
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is now
    with torch.device("meta"):
        case = build()
    pipe = sl.Pipeline(case.model, case.loss_fn, plan=plan, init_fn=fill)
    for _ in range(steps):
        pipe.step(inputs, target)
    found = status("VmHWM") - before
    pipe.close()
    return found


def main(name: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = sl.Plan.load(path)
    peak(name, plan)
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, peak(name, plan))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
