"""Peak memory of each rank, as the operating system sees it: Stageline and torch, each alone.

Memory that two ranks share counts half for each.

A rank makes only the weights of its own stages. Its peak is counted from before that to the end of
three steps, and glibc gives back what is freed at once, so that it keeps nothing for later. Before
that the same runs once, so that what libraries keep for themselves is there already.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.compare.contestants import ours, torch_pipelining
from benchmarks.compare.contestants.contestant import Contestant
from benchmarks.compare.launch import Group
from benchmarks.compare.orders import can_run, order_that_is_listed, own_order
from benchmarks.compare.stages import balance_of
from benchmarks.compare.turns import barrier
from benchmarks.compare.workloads import WORKLOADS, Case

import stageline as sl

# The environment in which glibc keeps nothing for later. A tensor of a page or more has pages of
# its own: with 32 KiB, the small feature maps of AmoebaNet at 64 x 64 pixels stayed in arenas from
# the run before, and 15.7 MB were counted where its tensors have 19.3 MB. With 4 KiB it is 19.8 MB,
# and 198.9 of 197.1 MB at 224 x 224 pixels.
FREED_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "4096",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
LIBRARIES = (ours.PROCESSES, torch_pipelining.TORCH)
STEPS = 3


def groups(workloads: Sequence[str], schedules: Sequence[str], *, is_quick: bool) -> list[Group]:
    """Return a group of processes for each workload and library, with a cell for each schedule."""
    return [
        Group(
            "memory",
            WORKLOADS[name].num_ranks,
            {
                f"memory | {name} | {schedule} | {library}": {
                    "library": library,
                    "workload": name,
                    "schedule": schedule,
                    "num_microbatches": WORKLOADS[name].num_microbatches,
                    "is_quick": is_quick,
                }
                for schedule in schedules
            },
            FREED_AT_ONCE,
        )
        for name in workloads
        for library in LIBRARIES
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of each rank, in bytes."""
    peak(cell)
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, peak(cell))
    return {"peaks": found}


def peak(cell: dict[str, Any]) -> int:
    """Return the most bytes that this process held, above those it had before the model."""
    workload = WORKLOADS[cell["workload"]]
    full = workload.case(workload.num_ranks, is_quick=cell["is_quick"])
    inputs, target = {name: x.clone() for name, x in full.inputs.items()}, full.target.clone()
    del full
    gc.collect()
    barrier()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is now
    with torch.device("meta"):
        case = workload.case(workload.num_ranks, is_quick=cell["is_quick"])
    contestant = make(case._replace(inputs=inputs, target=target), cell)
    for _ in range(STEPS):
        contestant.step()
        contestant.zero_grad()
    # A message in shared memory is once in the machine, and in the count of both its ranks: half of
    # it is for each, as in the kernel's Pss, of which it has no peak. All of it is still mapped.
    found = status("VmHWM") - before - status("RssShmem") // 2
    contestant.close()
    return found


def make(case: Case, cell: dict[str, Any]) -> Contestant:
    """Return the pipeline of a cell, with weights for the stages of this rank only."""
    if "plan" in cell:
        return ours.planned(case, read_plan(cell["plan"]), fill)
    name, count, ranks = cell["schedule"], cell["num_microbatches"], dist.get_world_size()
    num_stages = ranks * torch_pipelining.SCHEDULES[name].num_chunks
    given = cell.get("balance")
    balance = given or balance_of(case.layers, case.sample(count), num_stages)
    pipeline = torch_pipelining.build(case, name, ranks, count, balance)
    if cell["library"] == ours.PROCESSES:
        order = order_for(name, ranks, count, pipeline.schedule)
        return ours.processes(case, order, balance, init_fn=fill)
    for layer in pipeline.layers:
        layer.module.to_empty(device="cpu")
        fill(layer)
    return torch_pipelining.contestant(pipeline)


def order_for(name: str, ranks: int, count: int, schedule: Any) -> sl.Schedule:
    """Return torch's order; Stageline's where it is the same, or torch's cannot be run."""
    own = own_order(name, ranks, count)
    if own is not None and own.num_stages == ranks:  # the same, as pipelines.py checks
        return own
    listed = order_that_is_listed(schedule)
    return own if own is not None and not can_run(listed) else listed


def fill(layer: sl.Layer) -> None:
    """Give weights to a layer that was made without any."""
    with torch.no_grad():
        for parameter in layer.module.parameters():
            parameter.normal_(0.0, 0.02)
        for buffer in layer.module.buffers():
            buffer.fill_(1)


def read_plan(text: str) -> sl.Plan:
    """Return a plan from what `Plan.save` writes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(text, encoding="utf-8")
        return sl.Plan.load(path)


def status(key: str) -> int:
    """Return a figure of this process from the operating system, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))
