"""Looped breadth-first (arXiv 2211.05953): all micro-batches of a chunk before the next chunk.

rank 0 │ F0 F1 F2 f0 f1 f2 .. .. .. .. .. .. b0 b0 b1 b1 b2 b2 B0 B0 B1 B1 B2 B2
rank 1 │ .. F0 F1 F2 f0 f1 f2 .. .. .. b0 b0 b1 b1 b2 b2 B0 B0 B1 B1 B2 B2
rank 2 │ .. .. F0 F1 F2 f0 f1 f2 b0 b0 b1 b1 b2 b2 B0 B0 B1 B1 B2 B2
         p = 3, m = 3, the second chunk in lower case
"""

from __future__ import annotations

from stageline.schedules.action import Kind
from stageline.schedules.families.row_steps import number_steps
from stageline.schedules.placement import loop
from stageline.schedules.schedule import Schedule


def looped_bfs(num_ranks: int, num_microbatches: int, *, chunks_per_rank: int = 2) -> Schedule:
    """Return the schedule; with one chunk per rank it is GPipe."""
    placement = loop(num_ranks, chunks_per_rank)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, len(placement), num_ranks)
        forwards = [(stage, Kind.F) for stage in stages for _ in range(num_microbatches)]
        backwards = [(stage, Kind.B) for stage in reversed(stages) for _ in range(num_microbatches)]
        rows.append(number_steps(forwards + backwards))
    return Schedule.of(rows, placement)
