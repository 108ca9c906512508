"""1F1B with the backward in halves: weight gradients trail behind and fill what would be bubbles.

The two hand-made schedules of Zero Bubble (arXiv 2401.10241) are this with a lead of one or two.
What a rank near the start of the pipeline holds for forwards that run ahead, one near its end holds
for weight gradients that trail: 1 + lead · (p - 1) micro-batches on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.families.steps import Step, alternated, numbered
from stageline.schedules.placement import loop
from stageline.schedules.schedule import Schedule


def split_1f1b(num_ranks: int, num_microbatches: int, lead: int) -> Schedule:
    """Forwards run `lead` ahead for each rank that follows, and W trail `lead` for each before."""
    rows = (
        _row(rank, num_microbatches, lead * (num_ranks - 1 - rank), lead * rank)
        for rank in range(num_ranks)
    )
    return Schedule.of(rows, loop(num_ranks))


def _row(stage: int, num_microbatches: int, num_ahead: int, num_behind: int) -> Iterator[Action]:
    forward, input_grad, weight_grad = ((stage, kind) for kind in (Kind.F, Kind.I, Kind.W))
    num_late = min(num_behind, num_microbatches)
    backwards: list[tuple[Step, ...]] = [(input_grad,)] * num_late
    backwards += [(input_grad, weight_grad)] * (num_microbatches - num_late)
    backwards += [(weight_grad,)] * num_late
    return numbered(alternated([forward] * num_microbatches, backwards, num_ahead))
