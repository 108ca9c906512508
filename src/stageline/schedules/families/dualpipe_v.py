"""DualPipeV (github.com/deepseek-ai/DualPipe): forwards of one chunk with backwards of the other.

rank 0 │ F0 F1 F2 f0 i0 w0 f1 F3 b1 b1 f2 B0 B0 b2 b2 f3 .. B1 B1 b3 b3 I2 W2 I3 W3
rank 1 │ .. F0 f0 F1 f1 F2 b0 b0 f2 B0 B0 F3 b1 b1 f3 B1 B1 b2 b2 B2 B2 i3 I3 w3 W3
         p = 2, m = 4, the second chunk in lower case

Where DeepSeek overlaps a forward with a backward, the forward comes first.
"""

from __future__ import annotations

from stageline.errors import ScheduleError
from stageline.schedules.action import Kind
from stageline.schedules.families.row_steps import Step, number_steps
from stageline.schedules.placement import wave
from stageline.schedules.schedule import Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the DualPipeV schedule; it needs at least 2p micro-batches."""
    needed = 2 * num_ranks
    if num_microbatches < needed:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches}, but 'dualpipe_v' on {num_ranks} ranks needs "
            f"at least {needed}: use num_microbatches={needed}, or 'zbv'"
        )
    rows = (number_steps(_row(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    return Schedule.of(rows, wave(num_ranks))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    first, second = rank, 2 * num_ranks - 1 - rank
    f0, b0 = (first, Kind.F), (first, Kind.B)
    f1, b1, i1, w1 = ((second, kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    after = num_ranks - 1 - rank
    fill = [f0] * (2 * after) + [f0, f1] * (rank + 1) + [i1, w1, f1] * after
    full = [f0, b1, f1, b0] * (num_microbatches - 2 * num_ranks + rank + 1)
    drain = [b1, f1, b0] * after
    return fill + full + drain + _last_backwards(first, second, rank + 1, after)


def _last_backwards(first: int, second: int, num_pairs: int, num_alone: int) -> list[Step]:
    """Return backwards of both chunks in turn, half of them split, then of the first chunk only.

    W fill the time in which the first chunk alone would wait.
    """
    stages = [second, first] * num_pairs + [first] * num_alone
    whole, split = stages[:num_pairs], stages[num_pairs:]
    input_grads = [(stage, Kind.I) for stage in split]
    weight_grads = [(stage, Kind.W) for stage in split]
    steps = [(stage, Kind.B) for stage in whole] + input_grads[:num_pairs]
    for weight_grad, input_grad in zip(weight_grads, input_grads[num_pairs:], strict=False):
        steps += [weight_grad, input_grad]
    return steps + weight_grads[num_alone:]
