"""Host time of an action: steps of layers that do almost nothing, by the number of micro-batches.

What such a step takes is the time of the library itself. It is divided by the number of actions of
the busiest rank: two for each micro-batch, if a rank has one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from benchmarks.compare.agreement import check_agreement
from benchmarks.compare.contestants import loops, ours, torch_pipelining
from benchmarks.compare.launch import Group
from benchmarks.compare.models import Nothing
from benchmarks.compare.turns import close, take_turns
from benchmarks.compare.workloads import chain

import stageline as sl

MICROBATCHES = (8, 32, 128, 512, 1024)
QUICK = (8, 32)
SCHEDULE = "1f1b"


def groups(counts: Sequence[int], num_ranks: int, rounds: int) -> list[Group]:
    """Return one group, with a cell for each number of micro-batches."""
    cells = {
        f"host | p={num_ranks} | m={count}": {"num_microbatches": count, "rounds": rounds}
        for count in counts
    }
    return [Group("host", num_ranks, cells)]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a step, and the number of actions of the busiest rank."""
    count, ranks = cell["num_microbatches"], dist.get_world_size()
    schedule = sl.build_schedule(SCHEDULE, num_ranks=ranks, num_microbatches=count)
    case = partial(chain, ranks, layer=Nothing, batch=count)
    balance = [1] * ranks
    torchs = torch_pipelining.build(case(), SCHEDULE, ranks, count, balance)
    contestants = [
        ours.processes(case(), schedule, balance),
        torch_pipelining.contestant(torchs),
        ours.threads(case(), schedule, balance),
        loops.plain(case(), count),
    ]
    check_agreement(contestants, case())
    times = take_turns(contestants, cell["rounds"])
    close(contestants)
    return {"times": times, "num_actions": max(map(len, schedule.actions))}
