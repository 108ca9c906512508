"""How fast a stream goes once its pipeline is full: the time from one mini-batch to the next.

Ranks of 1F1B without a flush wait for each other in circles. One of them for any stages u to t:

    F_u ─► F_u+1 ─► … ─► F_t     on stage t the forward of n + d_t stands before the backward of n,
     ▲                    ▼      on stage u the backward of n before the forward of n + d_u + r_u
    B_u ◄─ B_u+1 ◄─ … ◄─ B_t     d: how far forwards are ahead, r: replicas; in micro-batches

A round takes what these stages work, and what is sent between them there and back, and moves on by
d_u + r_u - d_t micro-batches. There are no other circles but through the optimizer's steps, for
which replicas wait: a step is a circle of its own with all work of a rank, and the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stageline.errors import PlanError
from stageline.planning.partition.chain import Floats
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.families.pipedream import num_warmup


def least_pace(work: Floats, sent: Floats, replicas: Sequence[int]) -> Floats:
    """Time that a micro-batch takes at least: of several cuts, a row each.

    `work` is by stage, forward and backward; `sent` one way, from each stage but the last.

    >>> least_pace(np.array([[3.0, 6.0, 3.0]]), np.zeros((1, 2)), [1, 2, 1])
    array([4.5])
    """
    ahead = [num_warmup(replicas, stage) * count for stage, count in enumerate(replicas)]
    rounds = np.concatenate((work[:, :1], work[:, 1:] + 2 * sent), axis=1).cumsum(axis=1)
    least = np.zeros(len(work))
    for stage, count in enumerate(replicas):
        took = rounds[:, stage:] - rounds[:, stage : stage + 1] + work[:, stage : stage + 1]
        moved = ahead[stage] + count - np.array(ahead[stage:])
        least = np.maximum(least, (took / moved).max(axis=1))
    return least


def least_period(
    work: Floats, sent: Floats, reduced: Floats, replicas: Sequence[int], num_microbatches: int
) -> Floats:
    """Time of a mini-batch, at least; `reduced` is that of each stage's reduction."""
    of_ranks = (num_microbatches / np.array(replicas) * work + reduced).max(axis=1)
    least: Floats = np.maximum(num_microbatches * least_pace(work, sent, replicas), of_ranks)
    return least


def period_of(timeline: Timeline, num_microbatches: int) -> float:
    """Time from one mini-batch to the next, where a stream goes at its full pace.

    That is in the second half of its mini-batches: what is left of them when it drains does not
    change when they began. Some streams take turns of a longer and a shorter one, so an even number
    of them is looked at.
    """
    begun: dict[int, float] = {}
    for action, start, _ in timeline.spans[0]:
        if action.kind is Kind.F:
            begun.setdefault(action.microbatch // num_microbatches, start)
    count = (len(begun) - 1) // 4 * 2
    if count < 2:
        raise PlanError(
            f"a timeline has {len(begun)} mini-batches, but 5 at least show how long one takes: "
            "trace more of them"
        )
    starts = sorted(begun.values())
    return (starts[-1] - starts[-1 - count]) / count
