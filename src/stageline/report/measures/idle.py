"""Where a rank's time went that it did not work: what more micro-batches can cure, and what not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Idle(NamedTuple):
    """The idle time of one rank, in parts that add up to it."""

    bubble: float  # the schedule's own, if all stages took equally long
    imbalance: float  # more waiting for others than that: stages take unequally long
    transfer: float  # a message was on its way
    host: float  # between actions, with all that was needed at hand


def table(idle: Sequence[Idle], makespan: float) -> Iterator[str]:
    """A line for each rank, in per cent of the makespan.

    >>> print("\\n".join(table([Idle(25, 5, 0, 10)], 100)))
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
