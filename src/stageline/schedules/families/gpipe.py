"""GPipe (arXiv 1811.06965, figure 2c): all forwards, then all backwards.

rank 0 │ F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
rank 1 │ .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
rank 2 │ .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
         p = 3, m = 4

The figure runs the backwards in descending order. Here they ascend, because every schedule sums
gradients in ascending order; the bubble is the same.
"""

from __future__ import annotations

from stageline.schedules.families.looped_bfs import looped_bfs
from stageline.schedules.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule."""
    return looped_bfs(num_ranks, num_microbatches, chunks_per_rank=1)
