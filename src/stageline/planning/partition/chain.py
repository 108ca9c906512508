"""A chain of layers to be cut into runs: what a run costs on a stage, and which runs fit there.

    layer      0     1     2     3
    position  0     1     2     3     4       a cut is a position from 1 to 3
                    └──run──────┘             costs (layers 1 and 2) / speed + cut 1 + cut 3 + extra

A run from i to j on a stage costs tail[stage, j] - head[stage, i], so the best start for every stop
is a running maximum of heads: n steps instead of n².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stageline.errors import PlanError

Fits = Callable[[int, int, int], bool]  # start, stop, stage
Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Windows:
    """The starts that fit, for each stage and stop, as two spans of 2^power starts that overlap."""

    power: Whole
    left: Whole
    right: Whole
    is_empty: Flags

    @staticmethod
    def of(first_fit: Whole) -> Windows:
        stops = np.arange(first_fit.shape[1])
        power = (np.frexp(np.maximum(stops - first_fit, 1))[1] - 1).astype(np.int64)
        return Windows(power, first_fit, stops - 2**power, first_fit >= stops)

    def largest(self, values: Floats, stage: int) -> Floats:
        """For each stop, the largest of the values at the starts that fit."""
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
class Chain:
    """Costs by stage and position; `first_fit[stage, stop]` is the first start that fits."""

    head: Floats
    tail: Floats
    first_fit: Whole | None = None

    @property
    def num_stages(self) -> int:
        return len(self.head)

    @property
    def num_layers(self) -> int:
        return int(self.head.shape[1]) - 1

    @cached_property
    def windows(self) -> Windows | None:
        return None if self.first_fit is None else Windows.of(self.first_fit)

    def largest(self, ends: Sequence[int]) -> float:
        """Of the stages' costs, for cuts at these positions, 0 and the last included."""
        return max(self.costs(ends))

    def costs(self, ends: Sequence[int]) -> list[float]:
        stages = range(self.num_stages)
        return [float(self.tail[s, ends[s + 1]] - self.head[s, ends[s]]) for s in stages]


def chain_of(
    costs: Sequence[float],
    num_stages: int,
    *,
    transfers: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    extra: Sequence[float] | None = None,
) -> Chain:
    """`transfers` has one number for each of the n - 1 places between layers."""
    _check(costs, num_stages, transfers, speeds)
    cuts = np.array([0.0, *(transfers if transfers is not None else [0.0] * (len(costs) - 1)), 0.0])
    # Long doubles: a sum of 2,000 doubles is off by more than the ties that are told apart below.
    totals = np.cumsum(np.array([0.0, *costs], dtype=np.longdouble)).astype(np.float64)
    shares = totals / np.array(speeds if speeds is not None else [1.0] * num_stages)[:, None]
    beside = np.array(extra if extra is not None else [0.0] * num_stages)[:, None]
    return Chain(head=shares - cuts, tail=shares + cuts + beside)


def first_fits(fits: Fits, num_layers: int, num_stages: int) -> Whole:
    """What fits in a run fits in its parts too, so the first start only moves forward.

    Asked only where every earlier and later stage can still have a layer.
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
        raise PlanError(f"num_stages is {num_stages}, but has to be 1 at least")
    if len(costs) < num_stages:
        raise PlanError(
            f"there are {len(costs)} layers, but {num_stages} stages need one each at least: "
            "use fewer ranks or chunks, or cut the model into smaller layers"
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
        raise PlanError(f"{name} has {len(numbers)} numbers, but needs {length}: give one each")
    for place, number in enumerate(numbers):
        if not least <= number < np.inf:
            bound = "0 or more" if least == 0 else "above 0"
            raise PlanError(f"{name}[{place}] is {number}, but has to be finite and {bound}")
