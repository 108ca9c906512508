"""V-Min (arXiv 2405.15362): a third of 1F1B's activations, two thirds of its bubble if F = I = W.

rank 0 │ F0 .. .. .. .. f0 F1 i0 w0 .. .. f1 F2 I0 i1 W0 w1 f2 .. I1 i2 W1 w2 .. .. I2 W2
rank 1 │ .. F0 .. .. f0 .. .. F1 i0 w0 f1 .. I0 F2 W0 i1 f2 w1 I1 W1 .. i2 w2 .. I2 W2
rank 2 │ .. .. F0 f0 .. .. .. .. F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 .. .. i2 I2 w2 W2
         p = 3, m = 3, the second chunk in lower case
"""

from __future__ import annotations

from stageline.schedules.families.building_block import Slots, building_block
from stageline.schedules.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the V-Min schedule."""
    # without it, two actions would have the same slot if the number of ranks is a multiple of 3
    shift = 0 if num_ranks % 3 else 2

    def slots(rank: int) -> Slots:
        return (
            rank,
            2 * num_ranks - rank - 1,
            2 * num_ranks + shift + rank,
            4 * num_ranks + shift - rank - 1,
        )

    return building_block(num_ranks, num_microbatches, slots)
