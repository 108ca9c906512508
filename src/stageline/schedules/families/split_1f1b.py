"""1F1B with the backward split in I and W: delayed weight gradients fill the bubbles.

The two handcrafted schedules of Zero Bubble (arXiv 2401.10241), ZB-H1 and ZB-H2, have a lead of one
and two. Ranks near the start of the pipeline hold activations for forwards that run ahead, ranks
near its end for delayed weight gradients: 1 + lead · (p - 1) micro-batches on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.families.row_steps import Step, alternate, number_steps
from stageline.schedules.placement import loop
from stageline.schedules.schedule import Schedule


def split_1f1b(num_ranks: int, num_microbatches: int, lead: int) -> Schedule:
    """Return the schedule of rank r with (p-1-r) · lead forwards ahead and W r · lead behind."""
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
    return number_steps(alternate([forward] * num_microbatches, backwards, num_ahead))
