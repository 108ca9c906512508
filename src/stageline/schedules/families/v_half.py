"""V-Half (arXiv 2405.15362): half of 1F1B's activations, and half of its bubble if F = I = W.

rank 0 │ F0 F1 .. .. .. f0 i0 w0 F2 .. f1 i1 I0 w1 W0 F3 f2 i2 I1 w2 W1 f3 i3 I2 w3 W2 .. I3 W3
rank 1 │ .. F0 .. .. f0 F1 .. i0 w0 f1 F2 I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2 I2 i3 W2 w3 I3 W3
rank 2 │ .. .. F0 f0 .. .. F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 i3 I3 w3 W3
         p = 3, m = 4, the second chunk in lower case
"""

from __future__ import annotations

from stageline.schedules.families.building_block import Slots, building_block
from stageline.schedules.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the V-Half schedule."""
    # without it, two actions would have the same slot if the number of ranks is even
    shift = 0 if num_ranks % 2 else 3

    def slots(rank: int) -> Slots:
        return (
            2 * rank,
            3 * num_ranks - rank - 2,
            3 * num_ranks + shift + 2 * rank - 1,
            6 * num_ranks + shift - rank - 2,
        )

    return building_block(num_ranks, num_microbatches, slots)
