"""Measure the predicted cells, the parts of a step and the schedules on emulated accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch

import stageline as sl
from experiments.results import Results
from experiments.tables import emulate, paper, predict, schedules
from experiments.tables.breakdown import parts_of_step
from experiments.tables.gpipe_program import per_stage
from experiments.tables.predict import Cell
from experiments.tables.workloads import (
    AMOEBANET,
    RESNET,
    SLOW_RESNET,
    SMALL_AMOEBANET,
    WORKLOADS,
    Workload,
)

# Of a step on one device: on 8 ranks and with 32 micro-batches a forward then takes 4 ms.
SERIAL_SECONDS = 4.0
# A ResNet runs on the devices of its AmoebaNet: both have the same scale.
SCALED_AS = {RESNET.name: AMOEBANET, SLOW_RESNET.name: SMALL_AMOEBANET}
BREAKDOWN_MICROBATCHES = 32
# Links that take less are left out: their threads would cost more than they show.
NEGLIGIBLE_LINK = 0.02


class Job(NamedTuple):
    """A measurement that is stored under its name."""

    part: str  # "tables", "breakdown" or "schedules"
    name: str
    run: Callable[[int], Mapping[str, Any]]  # takes the number of steps


def jobs(results: Results) -> Iterator[Job]:
    """Yield all measurements; they need the predictions."""
    predicted = results.read()
    for workload in WORKLOADS:
        for num_microbatches in workload.microbatches:
            for num_ranks in paper.RANKS:
                yield table_job(predicted, Cell(workload, num_ranks, num_microbatches))
    for num_ranks in paper.RANKS:
        yield breakdown_job(predicted, Cell(AMOEBANET, num_ranks, BREAKDOWN_MICROBATCHES))
    for variant in schedules.VARIANTS:
        yield schedule_job(variant)


def measure(results: Results, job: Job, steps: int) -> None:
    torch.set_num_threads(1)
    results.run_once(job.name, lambda: job.run(steps), seed=0)


def table_job(predicted: Mapping[str, Any], cell: Cell) -> Job:
    costs = predict.stored_costs(found(predicted, cell))
    scale = scale_of(predicted, cell.workload)

    def run(steps: int) -> dict[str, Any]:
        links = link_share(costs) > NEGLIGIBLE_LINK
        return emulate.measure(costs, cell.num_microbatches, scale, steps, links=links)

    return Job("tables", f"measure {cell.name}", run)


def breakdown_job(predicted: Mapping[str, Any], cell: Cell) -> Job:
    costs = predict.stored_costs(found(predicted, cell))
    scale = scale_of(predicted, cell.workload)

    def run(steps: int) -> dict[str, Any]:
        made = emulate.emulated(costs, cell.num_microbatches, scale, links=True)
        with made.pipe:
            made.warm_up()
            traced = [made.traced_step() for _ in range(steps)]
        parts = [parts_of_step(timeline, 1e3 * taken, links=True) for timeline, taken in traced]
        return {"steps": [taken / scale for _, taken in traced], "scale": scale} | {
            "shares": [each.shares() for each in parts]
        }

    return Job("breakdown", f"breakdown K={cell.num_ranks}", run)


def schedule_job(variant: schedules.Variant) -> Job:
    return Job(
        "schedules",
        f"schedule {variant.title}",
        lambda steps: schedules.measured(variant, steps),
    )


def scale_of(predicted: Mapping[str, Any], workload: Workload) -> float:
    """Return emulated seconds for each second of the device."""
    cell = Cell(SCALED_AS.get(workload.name, workload), num_ranks=2, num_microbatches=32)
    costs = predict.stored_costs(found(predicted, cell))
    return SERIAL_SECONDS / (32 * sum(stage_seconds(costs)))


def stage_seconds(costs: sl.Costs) -> list[float]:
    """Return how long each stage works on a micro-batch."""
    names = ("forward", "recompute", "input_grad", "weight_grad")
    return [sum(times) for times in zip(*(per_stage(costs, n) for n in names), strict=True)]


def link_share(costs: sl.Costs) -> float:
    """Return the time of the longest message over that of the slowest stage.

    >>> two = sl.Costs([1.0, 2.0], 1, 1, recompute=1, message=1, links=sl.Link(bandwidth=10))
    >>> link_share(two)
    0.02
    """
    assert isinstance(costs.links, sl.Link)
    longest = max(per_stage(costs, "message")) / costs.links.bandwidth
    return longest / max(stage_seconds(costs))


def found(predicted: Mapping[str, Any], cell: Cell) -> Mapping[str, Any]:
    """Return the prediction of a cell; raise KeyError if it was not made."""
    name = f"predict {cell.name}"
    if name not in predicted:
        raise KeyError(f"{name!r} is missing in the results: run `predict` first")
    run: Mapping[str, Any] = predicted[name]
    return run


def median_index(times: list[float]) -> int:
    """Return the position of the median, or of the next shorter one.

    >>> median_index([3.0, 1.0, 2.0])
    2
    """
    return min(range(len(times)), key=lambda n: abs(times[n] - median(times)))
