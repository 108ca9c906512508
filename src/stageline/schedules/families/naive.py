"""Naive model parallelism (GPipe's figure 2b, arXiv 1811.06965): one micro-batch at a time.

rank 0 │ F0 .. .. .. .. .. .. B0 B0 F1 .. .. .. .. .. .. B1 B1
rank 1 │ .. F0 .. .. .. B0 B0 .. .. .. F1 .. .. .. B1 B1
rank 2 │ .. .. F0 B0 B0 .. .. .. .. .. .. F1 B1 B1
         p = 3, m = 2
"""

from __future__ import annotations

from stageline.schedules.action import Kind
from stageline.schedules.families.row_steps import number_steps
from stageline.schedules.placement import loop
from stageline.schedules.schedule import Schedule


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule without any overlap of micro-batches."""
    rows = (
        number_steps([(rank, Kind.F), (rank, Kind.B)] * num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule.of(rows, loop(num_ranks))
