"""Time cut into cells of equal length, for pictures made of characters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from stageline.limits import MOST_CELLS
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.schedules.action import NO_VERSION, WHOLE_BATCH, Action

Cell = dict[Action | None, float]  # what ran in a cell, and the share that it took; None is idle

MAX_CELLS_OF_MEDIAN = 4  # a grid in which most actions take more repeats itself
MAX_CELLS = 2000  # of the longest row


def exact_quantum(timeline: Timeline) -> float | None:
    """The longest time that divides every start and end, unless it is too short to draw."""
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
    """The shortest action, unless it is so short that it would stretch the picture."""
    durations = _durations(timeline)
    if not durations:
        return 1.0
    shortest_drawn = _median(durations) / MAX_CELLS_OF_MEDIAN
    return max(durations[0], shortest_drawn, timeline.makespan / _most_cells(timeline))


def hides_actions(timeline: Timeline, quantum: float) -> bool:
    """Whether some action is shorter than a cell."""
    durations = _durations(timeline)
    return bool(durations) and durations[0] < quantum * (1 - 1e-6)


def num_cells(timeline: Timeline, quantum: float) -> int:
    return math.ceil(timeline.makespan / quantum - 1e-6)


def cells(row: Sequence[Span], quantum: float, count: int) -> list[Cell]:
    """What runs in each of the first `count` cells of a row."""
    result: list[Cell] = [{None: 1.0} for _ in range(count)]
    for action, start, end in row:
        for i in range(int(start / quantum), min(math.ceil(end / quantum), count)):
            share = min(end / quantum, i + 1) - max(start / quantum, i)
            result[i][action] = result[i].get(action, 0.0) + share
            result[i][None] -= share
    return result


def main_actions(row: Iterable[Cell]) -> Iterator[Action | None]:
    """What takes most of each cell; an action before idleness, when both take half."""
    for cell in row:
        yield max(cell, key=lambda action: (round(cell[action], 9), action is not None))


def dithered(row: Iterable[Cell]) -> Iterator[Action | None]:
    """One of the actions in or before each cell, so that all of them appear as often as they ran.

    What took most of a cell would do for small pictures; but where a cell is a whole forward and
    backward, it would show backwards only.
    """
    owed: dict[Action | None, float] = defaultdict(float)
    for cell in row:
        for action, share in cell.items():
            owed[action and _kind_of(action)] += share
        shown = max(owed, key=lambda action: (round(owed[action], 9), action is not None))
        owed[shown] -= 1.0
        yield shown


def _kind_of(action: Action) -> Action:
    """An action for all that look alike in a letter."""
    return action._replace(microbatch=WHOLE_BATCH, version=NO_VERSION)


def _most_cells(timeline: Timeline) -> int:
    """Of the longest row; all rows together have to be drawn in a few seconds."""
    return min(MAX_CELLS, max(1, MOST_CELLS // max(timeline.num_ranks, 1)))


def _durations(timeline: Timeline) -> list[float]:
    """Of all actions that take time, from the shortest to the longest."""
    return sorted(end - start for row in timeline.spans for _, start, end in row if end > start)


def _median(durations: list[float]) -> float:
    return durations[len(durations) // 2]


def _common_divisor(a: float, b: float, tolerance: float) -> float:
    """Euclid's, for numbers with rounding errors."""
    while b > tolerance:
        a, b = b, abs(math.remainder(a, b))
    return a
