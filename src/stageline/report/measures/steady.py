"""How busy ranks are while a stream runs at its full pace: between its fill and its drain.

    rank 0 │ F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
    rank 1 │ .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
                      |              |                p = 2, forward and backward of the same length

The fill is over when every rank has begun its first backward; before, the first ranks wait for it.
The drain begins with the first rank that has no forward left to begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stageline.report.spans import Span
from stageline.schedules.action import Kind


def steady_window(spans: Iterable[Sequence[Span]]) -> tuple[float, float] | None:
    """When the fill is over and the drain begins; None if it begins before that."""
    rows = [row for row in spans if row]
    forwards = [[span.start for span in row if span.action.kind is Kind.F] for row in rows]
    backwards = [
        [span.start for span in row if span.action.kind in (Kind.I, Kind.B)] for row in rows
    ]
    if not rows or not all(forwards) or not all(backwards):
        return None
    filled, drains = max(map(min, backwards)), min(map(max, forwards))
    return (filled, drains) if filled < drains else None


def busy_share(row: Iterable[Span], window: tuple[float, float]) -> float:
    """The part of a window in which a rank works."""
    begin, end = window
    work = (min(span.end, end) - max(span.start, begin) for span in row)
    return sum(time for time in work if time > 0) / (end - begin)
