"""1F1B (PipeDream-Flush, arXiv 2006.09503): warm up, then alternate one forward with one backward.

rank 0 │ F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3
rank 1 │ .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3
rank 2 │ .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
         p = 3, m = 4
"""

from __future__ import annotations

from collections.abc import Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import loop
from stageline.schedules.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule."""
    rows = (_row(rank, num_ranks - 1 - rank, num_microbatches) for rank in range(num_ranks))
    return Schedule.of(rows, loop(num_ranks))


def _row(stage: int, num_warmup: int, num_microbatches: int) -> Iterator[Action]:
    """Yield a rank's actions; forwards run `num_warmup` ahead of backwards while any are left."""
    ahead = min(num_warmup, num_microbatches)
    for i in range(num_microbatches + ahead):
        if i < num_microbatches:
            yield Action(stage, Kind.F, i)
        if i >= ahead:
            yield Action(stage, Kind.B, i - ahead)
