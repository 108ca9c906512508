"""Measure idle time: its parts on each rank, and the busy share of a stream between fill and drain.

    rank 0 │ F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
    rank 1 │ .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
                      |              |                p = 2, forward and backward of the same length

The fill ends when every rank has started its first backward; until then the first ranks wait for
it. The drain begins when the first rank has started its last forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stageline.report.spans import Span
from stageline.schedules.action import Kind

ROUNDED = 1 - 1e-9  # the last digits of a sum depend on the order of its terms


class Idle(NamedTuple):
    """The idle time of one rank, as the sum of four parts."""

    bubble: float  # of the schedule, if all stages took equally long
    imbalance: float  # additional waiting, because stages do not take equally long
    transfer: float  # waiting for a message in transit
    host: float  # between actions although nothing was missing


def step_bubble(busy: Sequence[float], makespan: float) -> float:
    """Return the idle share of ranks × makespan, from the work of each rank."""
    return 1.0 - sum(busy) / (len(busy) * makespan) if makespan else 0.0


def span_bubble(busy: Sequence[float], rank_spans: Sequence[float]) -> float:
    """Return the idle share of the longest rank span, from the work and the span of each rank."""
    longest = max(rank_spans, default=0.0)
    pairs = zip(rank_spans, busy, strict=True)
    work = max((work for span, work in pairs if span >= longest * ROUNDED), default=0.0)
    return max(0.0, (longest - work) / longest) if longest else 0.0


def idle_table(idle: Sequence[Idle], makespan: float) -> Iterator[str]:
    """Yield a header and a line for each rank, in percent of the makespan.

    >>> print("\\n".join(idle_table([Idle(25, 5, 0, 10)], 100)))
              idle  bubble  imbalance  transfer    host
    rank 0  40.0 %  25.0 %      5.0 %     0.0 %  10.0 %
    """
    names = [f"rank {rank:>{len(str(len(idle) - 1))}}" for rank in range(len(idle))]
    rows: list[tuple[str, ...]] = [("", "idle", *Idle._fields)]
    for name, parts in zip(names, idle, strict=True):
        shares = (f"{100 * part / makespan:.1f} %" for part in (sum(parts), *parts))
        rows.append((name, *shares))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def steady_window(spans: Iterable[Sequence[Span]]) -> tuple[float, float] | None:
    """Return when the fill ends and the drain begins; None if the drain begins first."""
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
    """Return the fraction of a window in which a rank works."""
    begin, end = window
    work = (min(span.end, end) - max(span.start, begin) for span in row)
    return sum(time for time in work if time > 0) / (end - begin)
