"""When the memory of a rank changes, and to what: the curve that pictures and traces show."""

from __future__ import annotations

from collections.abc import Sequence

from stageline.report.spans import Level


def steps(levels: Sequence[Level]) -> dict[float, float]:
    """What is held from each time on. What is freed and taken again at the same time does not show.

    >>> steps([Level(0, 0, 5), Level(1, 1, 6), Level(3, 0, 5), Level(3, 1, 6), Level(4, 0, 5)])
    {0: 5, 1: 6, 4: 5}
    """
    last_at = {level.time: level.total for level in levels}
    changes: dict[float, float] = {}
    before = None
    for time, held in last_at.items():
        if held != before:
            changes[time] = held
        before = held
    return changes
