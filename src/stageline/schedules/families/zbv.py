"""ZB-V (Zero Bubble, arXiv 2401.10241): no bubble if F = I = W and m >= 2p, in the memory of 1F1B.

rank 0 │ F0 F1 F2 F3 .. f0 i0 w0 f1 i1 w1 f2 i2 I0 w2 W0 f3 i3 I1 w3 I2 W1 I3 W2 W3
rank 1 │ .. F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 I0 W0 f3 i2 I1 w2 i3 I2 W1 I3 w3 W2 W3
rank 2 │ .. .. F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 I1 i2 I2 w1 i3 I3 W1 w2 W2 w3 W3
         p = 3, m = 4, the second chunk in lower case

The phases of a rank and their lengths are those of torch.distributed.pipelining's ZBV schedule; the
positions of W are Stageline's own.
"""

from __future__ import annotations

from stageline.schedules.action import Kind
from stageline.schedules.families.fill_waits import fill_waits
from stageline.schedules.families.row_steps import Step, number_steps
from stageline.schedules.placement import wave
from stageline.schedules.schedule import Schedule


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-V schedule.

    With fewer than 2p - 1 micro-batches it is the schedule of 2p - 1 without the missing ones.
    """
    enough = max(num_microbatches, 2 * num_ranks - 1)
    rows = [
        [a for a in number_steps(_row(rank, num_ranks, enough)) if a.microbatch < num_microbatches]
        for rank in range(num_ranks)
    ]
    return Schedule.of(fill_waits(rows, 2 * num_ranks), wave(num_ranks))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    f0, i0, w0 = ((rank, kind) for kind in (Kind.F, Kind.I, Kind.W))
    f1, i1, w1 = ((2 * num_ranks - 1 - rank, kind) for kind in (Kind.F, Kind.I, Kind.W))
    after = num_ranks - 1 - rank
    fill = [f0] * (2 * after + 1) + [f1, f0] * rank + [f1, i1, w1] * (after + 1)
    full = [f0, i0, w0, f1, i1, w1] * (num_microbatches - 2 * num_ranks + 1 + rank)
    drain = [i0, w0, f1, i1, w1] * after + [i0, i1] * rank + [i0, w0] * (after + 1)
    return fill + full + drain + [w1, w0] * rank
