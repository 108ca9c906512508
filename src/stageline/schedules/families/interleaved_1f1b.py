"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): 1F1B over several chunks per rank.

rank 0 │ F0 F1 f0 f1 F2 .. b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1 .. b2 b2 .. b3 b3 B2 B2 B3 B3
rank 1 │ .. F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3
         p = 2, m = 4, the second chunk in lower case

Micro-batches pass through the chunks in groups: a whole group through one chunk, then through the
next. By default a group has as many micro-batches as there are ranks, if that divides
`num_microbatches`, and otherwise the smallest larger number that leaves no group with fewer than
that. If there are fewer micro-batches than ranks, they form one group.
"""

from __future__ import annotations

from collections.abc import Iterator

from stageline.arguments import shown
from stageline.errors import ScheduleError
from stageline.schedules.action import Action, Kind
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.families.row_steps import alternate, number_steps
from stageline.schedules.placement import loop
from stageline.schedules.schedule import Schedule


def interleaved_1f1b(
    num_ranks: int,
    num_microbatches: int,
    *,
    chunks_per_rank: int = 2,
    group_size: int | None = None,
) -> Schedule:
    """Return the schedule; with one chunk per rank it is 1F1B."""
    if chunks_per_rank == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    group = _group_size(num_ranks, num_microbatches, group_size)
    chunks = [
        chunk
        for first in range(0, num_microbatches, group)
        for chunk in range(chunks_per_rank)
        for _ in range(min(group, num_microbatches - first))
    ]
    placement = loop(num_ranks, chunks_per_rank)
    rows = []
    for rank in range(num_ranks):
        num_ahead = 2 * (num_ranks - 1 - rank) + (chunks_per_rank - 1) * group
        rows.append(_row(range(rank, len(placement), num_ranks), chunks, num_ahead))
    return Schedule.of(rows, placement)


def _row(stages: range, chunks: list[int], num_ahead: int) -> Iterator[Action]:
    """Yield a rank's actions; backwards pass through the chunks in reverse order."""
    forwards = [(stages[chunk], Kind.F) for chunk in chunks]
    backwards = [((stages[-1 - chunk], Kind.B),) for chunk in chunks]
    return number_steps(alternate(forwards, backwards, num_ahead))


def _group_size(num_ranks: int, num_microbatches: int, wanted: int | None) -> int:
    """Return the group size; raise `ScheduleError` for one that is too small.

    In a group shorter than the pipeline, a chunk's turn would come before its inputs are computed.
    """
    shortest = min(num_ranks, num_microbatches)
    possible = [
        size
        for size in range(shortest, num_microbatches + 1)
        if num_microbatches % size == 0 or num_microbatches % size >= shortest
    ]
    if wanted is None:
        return possible[0]
    if wanted in possible:
        return wanted
    below = [size for size in possible if size < wanted]
    above = [size for size in possible if size > wanted]
    raise ScheduleError(
        f"group_size is {shown(wanted)}, but 'interleaved_1f1b' on {num_ranks} ranks with "
        f"{num_microbatches} micro-batches needs groups of at least {shortest}, including the "
        f"last: use {' or '.join(map(str, below[-1:] + above[:1]))}"
    )
