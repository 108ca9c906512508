"""The cost of any run of consecutive layers on any stage, from sums over the first layers.

    layer      0     1     2     3
    position  0     1     2     3     4       a cut is a position from 1 to 3
                    └──run──────┘             costs (layers 1 and 2) / speed + cut 1 + cut 3

A run from i to j on a stage costs at_stop[stage, j] - at_start[stage, i]. So the best start for
every stop is a running maximum of at_start: n steps instead of n².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stageline.errors import PlanError

StageFits = Callable[[int, int, int], bool]  # start, stop, stage
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class FittingStarts:
    """The starts that fit for each stage and stop, as two overlapping spans of 2^power starts."""

    power: Integers
    left: Integers
    right: Integers
    is_empty: Booleans

    @staticmethod
    def of(first_fit: Integers) -> FittingStarts:
        stops = np.arange(first_fit.shape[1])
        power = (np.frexp(np.maximum(stops - first_fit, 1))[1] - 1).astype(np.int64)
        return FittingStarts(power, first_fit, stops - 2**power, first_fit >= stops)

    def largest(self, values: Floats, stage: int) -> Floats:
        """Return for each stop the largest of the values at the starts that fit."""
        power = self.power[stage]
        spans = np.full((int(power.max()) + 1, len(values)), -np.inf)
        spans[0] = values  # spans[power, i] is the largest of the 2^power values from i on
        for row in range(1, len(spans)):
            half = 2 ** (row - 1)
            np.maximum(spans[row - 1, :-half], spans[row - 1, half:], out=spans[row, :-half])
        best: Floats = np.maximum(spans[power, self.left[stage]], spans[power, self.right[stage]])
        best[self.is_empty[stage]] = -np.inf
        return best


@dataclass(frozen=True, eq=False)
class PrefixCosts:
    """Costs by stage and position; `first_fit[stage, stop]` is the first start that fits."""

    at_start: Floats
    at_stop: Floats
    first_fit: Integers | None = None

    @property
    def num_stages(self) -> int:
        return len(self.at_start)

    @property
    def num_layers(self) -> int:
        return int(self.at_start.shape[1]) - 1

    @cached_property
    def fitting_starts(self) -> FittingStarts | None:
        return None if self.first_fit is None else FittingStarts.of(self.first_fit)

    def bottleneck(self, boundaries: Sequence[int]) -> float:
        """Return the cost of the costliest stage; boundaries include 0 and the last position."""
        return max(self.stage_costs(boundaries))

    def stage_costs(self, boundaries: Sequence[int]) -> list[float]:
        return [
            float(self.at_stop[stage, boundaries[stage + 1]] - self.at_start[stage, start])
            for stage, start in enumerate(boundaries[:-1])
        ]


def prefix_costs(
    costs: Sequence[float],
    num_stages: int,
    *,
    transfers: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> PrefixCosts:
    """Return the costs of runs; `transfers` has a number for each of the n - 1 possible cuts."""
    _check(costs, num_stages, transfers, speeds)
    cuts = np.array([0.0, *(transfers if transfers is not None else [0.0] * (len(costs) - 1)), 0.0])
    # Long doubles: the error of a sum of 2,000 doubles is above the ties that are distinguished.
    totals = np.cumsum(np.array([0.0, *costs], dtype=np.longdouble)).astype(np.float64)
    times = totals / np.array(speeds if speeds is not None else [1.0] * num_stages)[:, None]
    return PrefixCosts(at_start=times - cuts, at_stop=times + cuts)


def first_fits(fits: StageFits, num_layers: int, num_stages: int) -> Integers:
    """Return for each stage and stop the first start that fits.

    Part of a run that fits also fits, so the first start only moves forward. Only runs that leave
    at least one layer for every earlier and later stage are tried.
    """
    table = np.zeros((num_stages, num_layers + 1), dtype=np.int64)
    for stage in range(num_stages):
        start = stage
        for stop in range(stage + 1, num_layers - num_stages + stage + 2):
            while start < stop and not fits(start, stop, stage):
                start += 1
            table[stage, stop] = start
    return table


def _check(
    costs: Sequence[float],
    num_stages: int,
    transfers: Sequence[float] | None,
    speeds: Sequence[float] | None,
) -> None:
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}, but has to be at least 1")
    if len(costs) < num_stages:
        raise PlanError(
            f"there are {len(costs)} layers, but {num_stages} stages need at least one each: "
            "use fewer ranks or chunks, or divide the model into smaller layers"
        )
    _check_numbers("costs", costs, len(costs), least=0.0)
    _check_numbers("transfers", transfers, len(costs) - 1, least=0.0)
    _check_numbers("speeds", speeds, num_stages, least=np.finfo(float).tiny)


def _check_numbers(
    name: str, numbers: Sequence[float] | None, length: int, *, least: float
) -> None:
    if numbers is None:
        return
    if len(numbers) != length:
        raise PlanError(f"{name} has {len(numbers)} numbers, but needs {length}")
    for index, number in enumerate(numbers):
        if not least <= number < np.inf:
            bound = "at least 0" if least == 0 else "above 0"
            raise PlanError(f"{name}[{index}] is {number}, but has to be finite and {bound}")
