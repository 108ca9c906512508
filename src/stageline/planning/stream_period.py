"""The time from one mini-batch to the next in an asynchronous pipeline that is full.

In 1F1B without a flush, ranks wait for each other in cycles. There is one for any stages u to t:

    F_u ─► F_u+1 ─► … ─► F_t     stage t runs the forward of micro-batch n + d_t before the
     ▲                    ▼      backward of n; stage u runs the backward of n before the forward
    B_u ◄─ B_u+1 ◄─ … ◄─ B_t     of n + d_u + r_u      (d: warm-up forwards, r: replicas)

One round of a cycle takes the work of its stages and the transfers between them in both directions,
without recomputation in B_u to B_t-1, which takes place while the gradient is on its way there, and
advances by d_u + r_u - d_t micro-batches. The only other cycles go through the optimizer steps,
for which replicas wait: a step is a cycle of its own with all work of a rank and the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stageline.errors import PlanError
from stageline.planning.partition.prefix_costs import Floats
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.families.pipedream import num_warmup


def min_time_per_microbatch(
    work: Floats, transfers: Floats, replicas: Sequence[int], recompute: Floats | None = None
) -> Floats:
    """Return a lower bound for the time per micro-batch, for several cuts with one row each.

    `work` has the forward and backward time of each stage, of which `recompute` is recomputation,
    `transfers` the one-way time of each stage but the last, and `replicas` the ranks of each stage.

    >>> min_time_per_microbatch(np.array([[3.0, 6.0, 3.0]]), np.zeros((1, 2)), [1, 2, 1])
    array([4.5])
    """
    ahead = [num_warmup(replicas, stage) * count for stage, count in enumerate(replicas)]
    again = np.zeros_like(work) if recompute is None else recompute
    passed = work - again
    rounds = np.concatenate((passed[:, :1], passed[:, 1:] + 2 * transfers), axis=1).cumsum(axis=1)
    bound = np.zeros(len(work))
    for stage, count in enumerate(replicas):
        took = rounds[:, stage:] - rounds[:, stage : stage + 1] + passed[:, stage : stage + 1]
        took = took + again[:, stage:]
        advance = ahead[stage] + count - np.array(ahead[stage:])
        bound = np.maximum(bound, (took / advance).max(axis=1))
    return bound


def min_period(
    work: Floats,
    transfers: Floats,
    reductions: Floats,
    replicas: Sequence[int],
    num_microbatches: int,
    recompute: Floats | None = None,
) -> Floats:
    """Return a lower bound for the time per mini-batch, including each stage's reduction."""
    per_rank = (num_microbatches / np.array(replicas) * work + reductions).max(axis=1)
    by_cycles = num_microbatches * min_time_per_microbatch(work, transfers, replicas, recompute)
    bound: Floats = np.maximum(by_cycles, per_rank)
    return bound


def period_of(timeline: Timeline, num_microbatches: int) -> float:
    """Return the time from one mini-batch to the next in a timeline once the pipeline is full.

    Only the second half of the mini-batches counts: the pipeline is full by then, and draining it
    at the end does not change when mini-batches start. Some schedules alternate between a longer
    and a shorter mini-batch, so an even number of them is averaged.
    """
    started: dict[int, float] = {}
    for action, start, _ in timeline.spans[0]:
        if action.kind is Kind.F:
            started.setdefault(action.microbatch // num_microbatches, start)
    count = (len(started) - 1) // 4 * 2
    if count < 2:
        raise PlanError(
            f"a timeline has {len(started)} mini-batches, but at least 5 are needed to measure "
            "the time of one: trace more mini-batches"
        )
    starts = sorted(started.values())
    return (starts[-1] - starts[-1 - count]) / count
