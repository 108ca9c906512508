"""Predict tables 2 and 3: profile, cut, simulate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import stageline as sl
from experiments.results import Results
from experiments.tables import gpipe_program, paper
from experiments.tables.stages import cut_by_parameters, cut_by_time, stage_costs
from experiments.tables.workloads import AMOEBANET, WORKLOADS, Workload

Cut = Callable[[sl.Profile, int, int], tuple[int, ...]]
CUTS: dict[str, Cut] = {"time": cut_by_time, "parameters": cut_by_parameters}
BANDWIDTHS = (0.5e9, 1e9, 2e9, 4e9, 6e9, 12e9, 24e9, 80e9, 300e9)  # of links, bytes per second
COSTS = ("forward", "input_grad", "weight_grad", "recompute", "message", "step")  # that are stored


class Cell(NamedTuple):
    """One cell of a table: a workload, its number of ranks and micro-batches, and how it is cut."""

    workload: Workload
    num_ranks: int
    num_microbatches: int
    cut: str = "time"

    @property
    def name(self) -> str:
        """Return the cell's name in the results."""
        cut = "" if self.cut == "time" else f" cut by {self.cut}"
        return f"{self.workload.name}{cut} K={self.num_ranks} M={self.num_microbatches}"

    @property
    def samples(self) -> int:
        """Return the size of a micro-batch."""
        return self.workload.batch // self.num_microbatches


def cells() -> Iterator[Cell]:
    """Yield the cells of both tables, and those of AmoebaNet cut by its parameters."""
    for workload in WORKLOADS:
        for num_microbatches in workload.microbatches:
            for num_ranks in paper.RANKS:
                yield Cell(workload, num_ranks, num_microbatches)
    for num_microbatches in AMOEBANET.microbatches:
        for num_ranks in paper.RANKS:
            yield Cell(AMOEBANET, num_ranks, num_microbatches, "parameters")


def predict(results: Results, cell: Cell) -> None:
    """Store the stages of a cell, the time of its step, and the largest batch that fits."""
    results.run_once(f"predict {cell.name}", lambda: predicted(cell), seed=0)


def predicted(cell: Cell) -> dict[str, Any]:
    profile = cell.workload.profile()
    balance = CUTS[cell.cut](profile, cell.samples, cell.num_ranks)
    costs = stage_costs(profile, cell.samples, balance, cell.workload.device)
    seconds = gpipe_program.makespan(costs, cell.num_microbatches)
    return {
        "balance": list(balance),
        "costs": {name: getattr(costs, name) for name in COSTS},
        "link": cell.workload.device.link,
        "step": seconds,
        "step_without_overlap": without_overlap(costs, cell.num_microbatches).makespan,
        "batch": cell.workload.batch,
        "peak_gb": peak_memory(costs, cell.num_microbatches) / 1e9,
        "largest_batch": largest_batch(cell, profile, balance),
    }


def stored_costs(run: Any) -> sl.Costs:
    """Return the costs of the stages of a predicted cell."""
    return sl.Costs(**run["costs"], links=sl.Link(bandwidth=run["link"]))


def peak_memory(costs: sl.Costs, num_microbatches: int) -> float:
    """Return the bytes that the fullest rank holds at most."""
    return max(without_overlap(costs, num_microbatches).peak_memory)


def without_overlap(costs: sl.Costs, num_microbatches: int) -> sl.Timeline:
    """Return the step whose recomputations begin when their gradients have arrived."""
    fields = (gpipe_program.per_stage(costs, name) for name in ("recompute", "input_grad"))
    backward = [sum(times) for times in zip(*fields, strict=True)]
    late = replace(costs, recompute=0.0, input_grad=backward)
    return gpipe_program.timeline(late, num_microbatches)


def largest_batch(cell: Cell, profile: sl.Profile, balance: Sequence[int]) -> int:
    """Return the largest mini-batch, a multiple of its micro-batches, that the devices can hold."""
    device, count = cell.workload.device, cell.num_microbatches

    def fits(samples: int) -> bool:
        costs = stage_costs(profile, samples, balance, device)
        return peak_memory(costs, count) <= device.memory

    return count * largest(fits)


def largest(fits: Callable[[int], bool], limit: int = 2**12) -> int:
    """Return the largest number up to the limit for which `fits`, which fits less often later.

    >>> largest(lambda number: number < 12)
    11
    """
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def predict_links(results: Results, workload: Workload) -> None:
    """Store the speed-up from 2 to 8 ranks for links of many bandwidths."""
    results.run_once(f"links {workload.name}", lambda: {"points": link_points(workload)}, seed=0)


def link_points(workload: Workload) -> list[tuple[float, float]]:
    profile, samples = workload.profile(), workload.batch // 32
    costs = {
        ranks: stage_costs(profile, samples, cut_by_time(profile, samples, ranks), workload.device)
        for ranks in (2, 8)
    }

    def seconds(ranks: int, bandwidth: float) -> float:
        linked = replace(costs[ranks], links=sl.Link(bandwidth=bandwidth))
        return gpipe_program.makespan(linked, 32)

    return [(rate, seconds(2, rate) / seconds(8, rate)) for rate in BANDWIDTHS]


def predict_plan(results: Results, workload: Workload, num_ranks: int) -> None:
    """Store what `sl.plan` chooses by itself for the workload's devices and mini-batch."""
    name = f"plan {workload.name} K={num_ranks}"
    results.run_once(name, lambda: planned(workload, num_ranks), seed=0)


def planned(workload: Workload, num_ranks: int) -> dict[str, Any]:
    device = workload.device
    level = sl.Level("link", num_ranks, bandwidth=device.link)
    cluster = sl.Cluster(num_devices=num_ranks, memory=device.memory, levels=(level,))
    sizes: dict[str, Any] = {"batch_size": workload.batch, "num_ranks": num_ranks}
    try:
        plan = sl.plan(workload.profile(), cluster, **sizes, optimizer="momentum")
    except sl.PlanError as error:
        return {"plan": None, "reason": str(error)}
    return {"plan": plan.chosen.description, "step": plan.chosen.seconds, "batch": workload.batch}
