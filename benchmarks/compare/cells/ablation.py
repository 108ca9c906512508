"""What each fast path is worth: Stageline as it is, beside Stageline with one of them off.

All run the same schedule over the same processes, several steps in a row. The loss is read after
the last one, except where that is what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.compare.agreement import check_agreement, plain_outcome
from benchmarks.compare.contestants import ours
from benchmarks.compare.contestants.contestant import Contestant
from benchmarks.compare.launch import Group
from benchmarks.compare.models import has_dropout, without_dropout
from benchmarks.compare.stages import balance_of
from benchmarks.compare.turns import close, take_turns
from benchmarks.compare.workloads import WORKLOADS, Case

import stageline as sl

WORKLOADS_OF = ("gpt-small", "gpt-large", "embedding-heavy", "resnet")
SCHEDULES = ("1f1b", "zb_h1")
STEPS = 3  # in a row
OFF = {  # by what is then done instead
    "messages over gloo": replace(ours.OPTIONS, shared_memory=False),
    "dense gradients of embeddings": replace(ours.OPTIONS, embedding_rows=False),
}
READING = "loss read in each step"
FUSED = "accumulate='fused'"  # no default: its bits are not those of a plain loop


def groups(workloads: Sequence[str], rounds: int, *, is_quick: bool) -> list[Group]:
    """Return a group of processes for each workload, with a cell for each schedule."""
    return [
        Group(
            "ablation",
            WORKLOADS[name].num_ranks,
            {
                f"ablation | {name} | {schedule}": {
                    "workload": name,
                    "schedule": schedule,
                    "rounds": rounds,
                    "is_quick": is_quick,
                }
                for schedule in SCHEDULES
            },
        )
        for name in workloads
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Check that all agree, and return their times by round."""
    workload = WORKLOADS[cell["workload"]]
    case = workload.case(workload.num_ranks, is_quick=cell["is_quick"])
    count = workload.num_microbatches
    schedule = sl.build_schedule(
        cell["schedule"], num_ranks=workload.num_ranks, num_microbatches=count
    )
    checked = case._replace(layers=without_dropout(case.layers))
    found = contestants(checked, schedule)
    check_agreement(found, case, plain_outcome(checked, count))
    if has_dropout(case.layers):
        close(found)
        found = contestants(case, schedule)
    in_turns = [each.in_a_row(STEPS, reads=each.name == READING) for each in found]
    times = take_turns(in_turns, cell["rounds"])
    close(found)
    return {"times": times}


def contestants(case: Case, schedule: sl.Schedule) -> list[Contestant]:
    """Return Stageline as it is, and with each of its fast paths off."""
    balance = balance_of(case.layers, case.sample(schedule.num_microbatches), schedule.num_ranks)
    make = partial(ours.processes, schedule=schedule, balance=balance)
    found = [make(case.copy()), make(case.copy(), name=READING)]
    found += (make(case.copy(), name=name, options=options) for name, options in OFF.items())
    fused = replace(ours.OPTIONS, accumulate="fused")
    return [*found, make(case.copy(), name=FUSED, options=fused)]
