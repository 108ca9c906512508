"""The same cut and the same order of work in Stageline and torch; and the baselines beside them.

A cell is a workload with one of torch's schedules. Stageline runs torch's own order over processes,
and its own order of the same name where that differs; for even models also in threads, beside the
machine's limit. The cell `baselines` has torchgpipe, plain loops and the limit beside Stageline's
1F1B and GPipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.compare.agreement import check_agreement, plain_outcome
from benchmarks.compare.contestants import loops, ours, torch_gpipe, torch_pipelining
from benchmarks.compare.contestants.contestant import Contestant
from benchmarks.compare.launch import Group
from benchmarks.compare.models import has_dropout, without_dropout
from benchmarks.compare.orders import bubble_factor, can_run, is_same, order_that_ran, own_order
from benchmarks.compare.stages import balance_of
from benchmarks.compare.turns import close, take_turns
from benchmarks.compare.workloads import UNEVEN, WORKLOADS, Case, Workload

import stageline as sl
from stageline.simulation.median_costs import median_costs

BASELINES = "baselines"
SCHEDULES = (*torch_pipelining.SCHEDULES, BASELINES)
OWN_ORDER = ", own order"
GPIPE = ", gpipe"
TRACED_STEPS = 7


class Line(NamedTuple):
    """The contestants of a cell, and what is known of their order."""

    contestants: list[Contestant]
    facts: dict[str, Any]


def groups(
    workloads: Sequence[str], schedules: Sequence[str], rounds: int, *, is_quick: bool
) -> list[Group]:
    """Return a group of processes for each workload, with a cell for each schedule."""
    found = []
    for name in workloads:
        workload = WORKLOADS[name]
        wanted = [each for each in schedules if not (workload.is_emulated and each == BASELINES)]
        cells = {
            f"pipelines | {name} | {schedule}": {
                "workload": name,
                "schedule": schedule,
                "rounds": rounds,
                "is_quick": is_quick,
            }
            for schedule in wanted
        }
        emulates = workload.is_emulated  # ranks that sleep share a core otherwise (stageline run)
        found.append(Group("pipelines", workload.num_ranks, cells, binds_cores=emulates))
    return found


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Check that the contestants of a cell agree, and return their times by round."""
    workload, name = WORKLOADS[cell["workload"]], cell["schedule"]
    make = baselines if name == BASELINES else contestants
    num_chunks = 1 if name == BASELINES else torch_pipelining.SCHEDULES[name].num_chunks
    case = workload.case(workload.num_ranks * num_chunks, is_quick=cell["is_quick"])
    checked = case._replace(layers=without_dropout(case.layers))
    line = make(workload, checked, name)
    reference = None if workload.is_emulated else plain_outcome(checked, workload.num_microbatches)
    check_agreement(line.contestants, case, reference)
    if has_dropout(case.layers):
        close(line.contestants)
        line = make(workload, case, name)
    times = take_turns(line.contestants, cell["rounds"])
    if not workload.is_emulated:
        line.facts["measured_bubble_factor"] = measured_bubble_factor(line.contestants[0])
    close(line.contestants)
    return {"times": times} | line.facts


def measured_bubble_factor(contestant: Contestant) -> float:
    """Return the bubble of a contestant's order with the costs that its own stages have."""
    assert contestant.trace is not None
    timelines = []
    for _ in range(TRACED_STEPS):
        timelines.append(contestant.trace())
        contestant.zero_grad()
    return bubble_factor(timelines[0].schedule, median_costs(timelines))


def contestants(workload: Workload, case: Case, name: str) -> Line:
    """Return torch and Stageline with one schedule; for even models also threads and the limit."""
    ranks, count = workload.num_ranks, workload.num_microbatches
    num_stages = ranks * torch_pipelining.SCHEDULES[name].num_chunks
    balance = balance_of(case.layers, case.sample(count), num_stages)
    pipeline = torch_pipelining.build(case.copy(), name, ranks, count, balance)
    orders = orders_of(pipeline, name, workload)
    found = [ours.processes(case.copy(), orders.ours, balance)]
    found.append(torch_pipelining.contestant(pipeline))
    if orders.other is not None:
        other = ours.processes(case.copy(), orders.other, balance, ours.PROCESSES + OWN_ORDER)
        found.append(other)
    if not workload.is_emulated and workload.name not in UNEVEN:
        found.append(ours.threads(case.copy(), orders.ours, balance))
        found.append(loops.limit(case.copy(), count))
    facts = {
        "balance": balance,
        "order": orders.relation,
        "bubble_factor": bubble_factor(orders.ours),
        "torch_bubble_factor": bubble_factor(orders.torchs),
        "num_actions": max(map(len, orders.ours.actions)),
    }
    return Line(found, facts)


class Orders(NamedTuple):
    """The order that torch runs, the one that Stageline runs beside it, and its own if another."""

    torchs: sl.Schedule
    ours: sl.Schedule
    other: sl.Schedule | None
    relation: str


def orders_of(pipeline: torch_pipelining.TorchPipeline, name: str, workload: Workload) -> Orders:
    """Record torch's order, and compare it with Stageline's of the same name."""
    torchs = order_that_ran(pipeline.stages, pipeline.step)
    own = own_order(name, workload.num_ranks, workload.num_microbatches)
    if own is None:
        return Orders(torchs, torchs, None, "torch's; Stageline has none of this name")
    if is_same(torchs, own):
        return Orders(torchs, own, None, "the same")
    if not can_run(torchs):
        return Orders(torchs, own, None, "each its own: torch's descends")
    return Orders(torchs, torchs, own, "torch's; Stageline's own differs")


def baselines(workload: Workload, case: Case, _: str) -> Line:
    """Return torchgpipe and plain loops, beside Stageline's 1F1B and the GPipe of torchgpipe."""
    ranks, count = workload.num_ranks, workload.num_microbatches
    balance = balance_of(case.layers, case.sample(count), ranks)

    def order(name: str) -> sl.Schedule:
        return sl.build_schedule(name, num_ranks=ranks, num_microbatches=count)

    one_f_one_b = order("1f1b")
    found = [
        ours.processes(case.copy(), one_f_one_b, balance),
        ours.threads(case.copy(), one_f_one_b, balance),
        ours.threads(case.copy(), order("gpipe"), balance, ours.THREADS + GPIPE),
        torch_gpipe.contestant(case.copy(), count, balance),
        loops.plain(case.copy(), count),
        loops.plain_with_all_threads(case.copy(), count),
        loops.limit(case.copy(), count),
    ]
    return Line(found, {"balance": balance, "bubble_factor": bubble_factor(one_f_one_b)})
