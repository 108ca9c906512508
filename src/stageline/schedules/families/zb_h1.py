"""ZB-H1 (Zero Bubble, arXiv 2401.10241): a third of 1F1B's bubble if F = I = W, in the same memory.

rank 0 │ F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
rank 1 │ .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
rank 2 │ .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
         p = 3, m = 5
"""

from __future__ import annotations

from stageline.schedules.families.split_1f1b import split_1f1b
from stageline.schedules.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule."""
    return split_1f1b(num_ranks, num_microbatches, lead=1)
