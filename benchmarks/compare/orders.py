"""The orders that schedules run: torch's own as a value of ours, to be compared and run.

Names coincide, orders need not: torch's ZB-V differs from ours. So Stageline runs torch's order
beside torch, which compares the runtimes, and its own order as well where that is another. It does
not run an order in which backwards descend, as they do in torch's LoopedBFS: there it has only its
own.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

import stageline as sl

COMPUTE = ("F", "I", "W", "B", "OVERLAP_F_B")


def order_that_ran(stages: Sequence[Any], step: Callable[[], object]) -> sl.Schedule:
    """Return what torch's stages do in a step, in all processes.

    `pipeline_order` is not it: that of torch's 1F1B, which nothing runs, begins with micro-batch 1
    on the last rank and ends with one that does not exist.
    """
    ran: list[str] = []
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    for stage in stages:
        for letter, name in zip("FBW", names, strict=True):
            setattr(stage, name, partial(_noted, ran, stage, letter, getattr(stage, name)))
    step()
    for stage in stages:
        for name in names:
            delattr(stage, name)  # the class's own again
    rows: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(rows, ran)
    return _schedule(rows)


def order_that_is_listed(schedule: Any) -> sl.Schedule:
    """Return the order that a schedule of torch with several stages on a rank lists, and runs."""
    return _schedule(
        [str(action) for action in row if action and action.computation_type.value in COMPUTE]
        for _, row in sorted(schedule.pipeline_order.items())
    )


def own_order(name: str, num_ranks: int, num_microbatches: int) -> sl.Schedule | None:
    """Return Stageline's order of this name, if it has one."""
    if name not in sl.schedule_names():
        return None
    return sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def is_same(one: sl.Schedule, other: sl.Schedule) -> bool:
    """Return whether all ranks do the same in the same order, on the same placement."""
    return (one.placement, one.actions) == (other.placement, other.actions)


def can_run(order: sl.Schedule) -> bool:
    """Return whether Stageline runs this order: gradients of a stage are added in ascending order.

    >>> can_run(sl.build_schedule("zbv", num_ranks=2, num_microbatches=4))
    True
    """
    latest: dict[tuple[int, bool], int] = {}
    for action in (action for row in order.actions for action in row if action.kind != "F"):
        key = action.stage, action.kind == "W"
        if latest.get(key, -1) > action.microbatch:
            return False
        latest[key] = action.microbatch
    return True


EQUAL = sl.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)


def bubble_factor(order: sl.Schedule, costs: sl.Costs = EQUAL) -> float:
    """Return how much longer a step takes than the average rank works.

    By default all stages take the same time, and F, I and W are equal, as in layers of matrix
    products.
    """
    timeline = sl.simulate(order, costs)
    return timeline.makespan * timeline.num_ranks / sum(timeline.busy)


def _noted(
    ran: list[str], stage: Any, letter: str, run: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Write an action down, and do it. A backward without W is an I."""
    if letter == "B" and not named.get("full_backward", True):
        letter = "I"
    microbatch = args[0] if args else named["bwd_chunk_id"]
    ran.append(f"{stage.stage_index}{letter}{microbatch}")
    return run(*args, **named)


def _schedule(rows: Iterable[Iterable[str]]) -> sl.Schedule:
    """Return the rows of ranks as a schedule, by way of the CSV that both libraries have."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        return sl.Schedule.from_csv(path)
