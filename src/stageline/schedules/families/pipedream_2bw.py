"""PipeDream-2BW (arXiv 2006.09503): 1F1B without a flush, with two versions of the weights.

rank 0 │ F0⁰ F1⁰ ... B0⁰ F2⁰ B1⁰ F3⁰ B2⁰ F4¹ B3⁰ F5¹ B4¹ ..
rank 1 │ ... F0⁰ B0⁰ F1⁰ B1⁰ F2⁰ B2⁰ F3⁰ B3⁰ F4¹ B4¹ F5¹ ..      p = 2, m = 2

The gradients of m >= p micro-batches make one step, and all of them use the weights of one step
earlier: W(t+1) = W(t) - lr · grad f(W(t-1)). So the delay is one step on every stage, and two
versions of the weights suffice.
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.errors import ScheduleError
from stageline.schedules.families.pipedream import checked_replicas, stream_1f1b
from stageline.schedules.schedule import Schedule


def pipedream_2bw(
    num_ranks: int,
    num_microbatches: int,
    *,
    num_minibatches: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule; it needs at least as many micro-batches as ranks."""
    if num_microbatches < num_ranks:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches}, but 'pipedream_2bw' on {num_ranks} ranks "
            f"needs at least {num_ranks} so that two weight versions suffice: use more, or "
            "'pipedream'"
        )
    counts = checked_replicas(replicas, num_ranks, num_microbatches)
    return stream_1f1b(counts, num_microbatches, lambda *_: -1, num_minibatches)
