"""Divide time into cells of equal length, for pictures made of characters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from stageline.limits import MOST_CELLS
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.schedules.action import NO_VERSION, WHOLE_BATCH, Action

CellShares = dict[Action | None, float]  # the share of a cell that each action takes; None: idle

MAX_CELLS_OF_MEDIAN = 4  # cells of the median action; more would only repeat it
MAX_CELLS = 2000  # in the longest row


def exact_quantum(timeline: Timeline) -> float | None:
    """Return the longest time that divides every start and end; None if it is too short."""
    durations = _durations(timeline)
    if not durations:
        return None
    shortest = timeline.makespan / _most_cells(timeline)
    least = max(_median(durations) / (MAX_CELLS_OF_MEDIAN + 0.5), shortest)
    divisor = 0.0
    for time in sorted({time for row in timeline.spans for span in row for time in span[1:]}):
        divisor = _common_divisor(time, divisor, 1e-6 * durations[0])
        if time and divisor < least:
            return None
    return divisor


def rough_quantum(timeline: Timeline) -> float:
    """Return the duration of the shortest action, unless the picture would be too wide."""
    durations = _durations(timeline)
    if not durations:
        return 1.0
    shortest_drawn = _median(durations) / MAX_CELLS_OF_MEDIAN
    return max(durations[0], shortest_drawn, timeline.makespan / _most_cells(timeline))


def hides_actions(timeline: Timeline, quantum: float) -> bool:
    """Return whether an action is shorter than a cell."""
    durations = _durations(timeline)
    return bool(durations) and durations[0] < quantum * (1 - 1e-6)


def num_cells(timeline: Timeline, quantum: float) -> int:
    """Return the number of cells up to the makespan."""
    return math.ceil(timeline.makespan / quantum - 1e-6)


def cells(row: Sequence[Span], quantum: float, count: int) -> list[CellShares]:
    """Return what runs in each of the first `count` cells of a row."""
    result: list[CellShares] = [{None: 1.0} for _ in range(count)]
    for action, start, end in row:
        for i in range(int(start / quantum), min(math.ceil(end / quantum), count)):
            share = min(end / quantum, i + 1) - max(start / quantum, i)
            result[i][action] = result[i].get(action, 0.0) + share
            result[i][None] -= share
    return result


def main_actions(row: Iterable[CellShares]) -> Iterator[Action | None]:
    """Yield what takes most of each cell; an action, if it and idle time take half each."""
    for cell in row:
        yield max(cell, key=lambda action: (round(cell[action], 9), action is not None))


def dithered(row: Iterable[CellShares]) -> Iterator[Action | None]:
    """Yield an action for each cell such that each kind is shown in proportion to its time.

    `main_actions` would show only backwards if a cell is as long as a forward and a backward.
    """
    unshown: dict[Action | None, float] = defaultdict(float)
    for cell in row:
        for action, share in cell.items():
            unshown[action and _without_microbatch(action)] += share
        shown = max(unshown, key=lambda action: (round(unshown[action], 9), action is not None))
        unshown[shown] -= 1.0
        yield shown


def _without_microbatch(action: Action) -> Action:
    """Return an action without micro-batch and version, which a letter does not show."""
    return action._replace(microbatch=WHOLE_BATCH, version=NO_VERSION)


def _most_cells(timeline: Timeline) -> int:
    """Return the limit for one row, such that all rows are drawn in a few seconds."""
    return min(MAX_CELLS, max(1, MOST_CELLS // max(timeline.num_ranks, 1)))


def _durations(timeline: Timeline) -> list[float]:
    """Return the durations of all actions that take time, sorted."""
    return sorted(end - start for row in timeline.spans for _, start, end in row if end > start)


def _median(durations: list[float]) -> float:
    return durations[len(durations) // 2]


def _common_divisor(a: float, b: float, tolerance: float) -> float:
    """Return the greatest common divisor of numbers with rounding errors (Euclid)."""
    while b > tolerance:
        a, b = b, abs(math.remainder(a, b))
    return a
