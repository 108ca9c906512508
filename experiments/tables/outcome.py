"""What the stored results say: normalised throughput, fixed costs and shares, by cell."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from experiments.tables import gpipe_program, paper
from experiments.tables.breakdown import parts_of_step
from experiments.tables.measure import BREAKDOWN_MICROBATCHES, median_index
from experiments.tables.predict import Cell, stored_costs
from experiments.tables.workloads import AMOEBANET, Workload

Runs = Mapping[str, Mapping[str, Any]]


class Measured(NamedTuple):
    """A measured figure: the median of several steps, and half of their range."""

    value: float
    spread: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ±{self.spread:.2f}"


def seconds(runs: Runs, cell: Cell, field: str = "step") -> float | None:
    """Return the predicted time of a step; `field` chooses the prediction."""
    run = runs.get(f"predict {cell.name}")
    return run[field] if run else None


def measured_seconds(runs: Runs, cell: Cell) -> Measured | None:
    run = runs.get(f"measure {cell.name}")
    return of_steps(run["steps"]) if run else None


def of_steps(steps: list[float]) -> Measured:
    """Return the median and half of the range.

    >>> of_steps([1.0, 3.0, 1.5])
    Measured(value=1.5, spread=1.0)
    """
    return Measured(median(steps), (max(steps) - min(steps)) / 2)


def base(cell: Cell) -> Cell:
    """Return the cell that a table is normalised to: two ranks, the fewest micro-batches."""
    fewest = min(cell.workload.microbatches)
    return Cell(cell.workload, paper.RANKS[0], fewest, cell.cut)


def predicted_throughput(runs: Runs, cell: Cell, field: str = "step") -> float | None:
    own, other = seconds(runs, cell, field), seconds(runs, base(cell), field)
    return other / own if own and other else None


def measured_throughput(runs: Runs, cell: Cell) -> Measured | None:
    return faster(measured_seconds(runs, base(cell)), measured_seconds(runs, cell))


def limit(num_ranks: int, num_microbatches: int) -> float:
    """Return GPipe's throughput over that of one rank at a time, if all stages are equal.

    It is p · m / (m + p - 1): the bubble is all that is lost.

    >>> limit(8, 32) == 8 * 32 / 39
    True
    """
    return num_ranks * num_microbatches / (num_microbatches + num_ranks - 1)


def milliseconds_per_action(runs: Runs, cell: Cell) -> float | None:
    """Return what each action of a rank took beyond the prediction, as emulated.

    A rank has a forward, a recomputation and a backward for each micro-batch.
    """
    expected, found = seconds(runs, cell), measured_seconds(runs, cell)
    if expected is None or found is None:
        return None
    scale: float = runs[f"measure {cell.name}"]["scale"]
    return 1e3 * scale * (found.value - expected) / (3 * cell.num_microbatches)


def mean_forward(runs: Runs, cell: Cell) -> float | None:
    """Return the mean time of a forward on the emulated devices, in ms."""
    measured, predicted = runs.get(f"measure {cell.name}"), runs.get(f"predict {cell.name}")
    if measured is None or predicted is None:
        return None
    scale: float = measured["scale"]
    return 1e3 * scale * fmean(predicted["costs"]["forward"])


def breakdown(runs: Runs, num_ranks: int) -> dict[str, float] | None:
    """Return the parts of the step that took the median time."""
    run = runs.get(f"breakdown K={num_ranks}")
    if run is None:
        return None
    shares: dict[str, float] = run["shares"][median_index(run["steps"])]
    return shares


def predicted_breakdown(runs: Runs, num_ranks: int) -> dict[str, float] | None:
    """Return the parts of the step that is simulated from the stored stages."""
    cell = Cell(AMOEBANET, num_ranks, BREAKDOWN_MICROBATCHES)
    run = runs.get(f"predict {cell.name}")
    if run is None:
        return None
    costs = gpipe_program.with_links_as_ranks(stored_costs(run))
    timeline = gpipe_program.as_traced(gpipe_program.timeline(costs, cell.num_microbatches))
    return parts_of_step(timeline, timeline.makespan, links=True).shares()


def speed_up(runs: Runs, workload: Workload) -> tuple[float | None, Measured | None]:
    """Return by how much 8 ranks are faster than 2 with 32 micro-batches: predicted, measured."""
    two, eight = (Cell(workload, ranks, 32) for ranks in (2, 8))
    slow, fast = seconds(runs, two), seconds(runs, eight)
    predicted = slow / fast if slow and fast else None
    return predicted, faster(measured_seconds(runs, two), measured_seconds(runs, eight))


def faster(slow: Measured | None, fast: Measured | None) -> Measured | None:
    """Return by how much a step is faster than another, with the spread of the faster one."""
    if slow is None or fast is None:
        return None
    value = slow.value / fast.value
    return Measured(value, value * fast.spread / fast.value)
