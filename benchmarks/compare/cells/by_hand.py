"""What `sl.plan` makes of uneven models, beside what people do by hand, within the same memory.

    torch by hand: peak of its ranks ──► plan within that peak ──► both in turns ──► the plan's peak

By hand: torch's 1F1B, the same number of layers on each rank, and 4 or 8 micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from benchmarks.compare.agreement import check_agreement, plain_outcome
from benchmarks.compare.cells import memory
from benchmarks.compare.contestants import ours, torch_pipelining
from benchmarks.compare.contestants.contestant import Contestant, rank
from benchmarks.compare.launch import Group
from benchmarks.compare.stages import equal_balance
from benchmarks.compare.turns import close, take_turns
from benchmarks.compare.workloads import RANKS, WORKLOADS, Case
from experiments.results import Run
from torch import nn

import stageline as sl

USUAL = (4, 8)  # micro-batches
BY_HAND, SCHEDULE = "torch by hand", "1f1b"
TINY_MEMORY = 2**26  # bytes: pages are too coarse to measure that of a tiny model
Cells = dict[str, dict[str, Any]]


def hand_memory(workloads: Sequence[str], *, is_quick: bool) -> list[Group]:
    """Return the groups that measure the memory of what is done by hand."""
    cells: Cells = {}
    for name in workloads:
        layers = WORKLOADS[name].case(RANKS, is_quick=is_quick).layers
        for count in USUAL:
            cells[memory_name(name, count, BY_HAND)] = {
                "library": torch_pipelining.TORCH,
                "workload": name,
                "schedule": SCHEDULE,
                "num_microbatches": count,
                "balance": equal_balance(len(layers), RANKS),
                "is_quick": is_quick,
            }
    return [Group("memory", RANKS, cells, memory.FREED_AT_ONCE)]


def turns(
    workloads: Sequence[str], stored: dict[str, Run], rounds: int, *, is_quick: bool
) -> list[Group]:
    """Return the group that plans and measures, within the memory that is stored."""
    cells: Cells = {}
    for name in workloads:
        for count in USUAL:
            if run := stored.get(memory_name(name, count, BY_HAND)):
                cells[turns_name(name, count)] = {
                    "workload": name,
                    "num_microbatches": count,
                    "memory": max(*run["peaks"], TINY_MEMORY if is_quick else 0),
                    "rounds": rounds,
                    "is_quick": is_quick,
                }
    return [Group("by-hand", RANKS, cells)]


def plan_memory(workloads: Sequence[str], stored: dict[str, Run], *, is_quick: bool) -> list[Group]:
    """Return the groups that measure the memory of the plans that are stored."""
    cells: Cells = {}
    for name in workloads:
        for count in USUAL:
            if run := stored.get(turns_name(name, count)):
                facts = {"workload": name, "plan": run["plan"], "is_quick": is_quick}
                cells[memory_name(name, count, ours.PLANNED)] = facts
    return [Group("memory", RANKS, cells, memory.FREED_AT_ONCE)]


def turns_name(workload: str, count: int) -> str:
    return f"by-hand | {workload} | m={count}"


def memory_name(workload: str, count: int, who: str) -> str:
    return f"memory by hand | {workload} | m={count} | {who}"


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Plan on the first process, check both against plain loops, and return their times."""
    workload, count = WORKLOADS[cell["workload"]], cell["num_microbatches"]
    case = workload.case(RANKS, is_quick=cell["is_quick"])
    cluster = sl.measure_links(memory=cell["memory"], progress=False)
    text = [plan_text(case, cluster, cell) if rank() == 0 else None]
    dist.broadcast_object_list(text)
    plan = memory.read_plan(text[0] or "")
    planned, hand = ours.planned(case.copy(), plan), by_hand(case.copy(), count)
    chosen = plan.chosen
    check_agreement([hand], case, plain_outcome(case, count))
    check_agreement([planned], case, plain_outcome(case, chosen.replicas * chosen.num_microbatches))
    times = take_turns([planned, hand], cell["rounds"])
    close([planned, hand])
    return {
        "times": times,
        "plan": text[0],
        "chosen": describe(plan),
        "expected": plan.timeline.makespan / 1e3,
    }


def describe(plan: sl.Plan) -> str:
    """Return the schedule, micro-batches and replicas of a plan.

    A replica of one rank is no pipeline any more.
    """
    chosen = plan.chosen
    order = chosen.schedule if chosen.num_ranks > 1 else "one rank"
    replicas = f", {chosen.replicas} replicas" if chosen.replicas > 1 else ""
    return f"{order}, m = {chosen.num_microbatches}{replicas}"


def by_hand(case: Case, num_microbatches: int) -> Contestant:
    """Return torch's 1F1B with equal numbers of layers."""
    balance = equal_balance(len(case.layers), RANKS)
    pipeline = torch_pipelining.build(case, SCHEDULE, RANKS, num_microbatches, balance)
    return torch_pipelining.contestant(pipeline, BY_HAND)


def without_statistics(layers: sl.LayerSequence) -> sl.LayerSequence:
    """Return copies of the layers whose BatchNorms have no running statistics.

    Contestants update these by micro-batch, in torch's own kernel. A profile is of the default,
    by mini-batch, which reads each input once more: AmoebaNet's forward of two samples takes
    53 ms with it, and 35 ms without.
    """
    found = layers.copy()
    for part in found.modules.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.track_running_stats = False
    return found


def plan_text(case: Case, cluster: sl.Cluster, cell: dict[str, Any]) -> str:
    """Profile with both cores at work and plan; return what `Plan.save` writes."""
    batch = len(case.target)
    profile = sl.profile(
        without_statistics(case.layers),
        case.inputs,
        loss_fn=case.loss_fn,
        target=case.target,
        sizes=sorted({max(1, batch // share) for share in (32, 16, 8, 4, 2)}),
        repeats=1 if cell["is_quick"] else 7,
        ranks=RANKS,
        progress=False,
    )
    plan = sl.plan(profile, cluster, batch_size=batch, optimizer="sgd")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        return path.read_text(encoding="utf-8")
