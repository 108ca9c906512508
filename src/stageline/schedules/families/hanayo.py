"""Hanayo (arXiv 2308.15762): 1F1B in waves, each a V over all ranks; more waves, less bubble.

rank 0 │ F0 F1 F2 .. .. f0 b0 b0 f1 b1 b1 f2 b2 b2 .. .. B0 B0 .. .. B1 B1 .. .. B2 B2
rank 1 │ .. F0 F1 .. f0 F2 f1 .. b0 b0 f2 b1 b1 .. B0 B0 b2 b2 B1 B1 .. .. B2 B2
rank 2 │ .. .. F0 f0 F1 f1 F2 f2 .. .. b0 b0 B0 B0 b1 b1 B1 B1 b2 b2 B2 B2
         p = 3, m = 3, the second chunk in lower case

A rank's time is divided into cells of six slots, which begin four slots later on each next rank. In
a cell one micro-batch passes forward through a wave, and one backward:

    │ F f b b B B │ F f b b B B │ …        upper case: wave goes down, lower case: wave goes up

A pass takes p cells to return to the first rank. So p micro-batches take turns in the first wave,
then the same p in the second, and so on, and no cell stays empty if p divides m.

Placement and waves are those of the paper. The order within cells is Stageline's own, and its
bubble is never larger than the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator

from stageline.errors import ScheduleError
from stageline.schedules.action import Action, Kind
from stageline.schedules.families.building_block import PERIOD, in_slot_order
from stageline.schedules.placement import wave
from stageline.schedules.schedule import Schedule


def hanayo(num_ranks: int, num_microbatches: int, *, chunks_per_rank: int = 2) -> Schedule:
    """Return the schedule with `chunks_per_rank` / 2 waves."""
    if chunks_per_rank % 2:
        nearest = [str(n) for n in (chunks_per_rank - 1, chunks_per_rank + 1) if n]
        raise ScheduleError(
            f"chunks_per_rank is {chunks_per_rank}, but 'hanayo' needs two for each wave: "
            f"use {' or '.join(nearest)}"
        )
    rows = (
        in_slot_order(
            slot
            for microbatch in range(num_microbatches)
            for index in range(chunks_per_rank // 2)
            for slot in _pass(rank, num_ranks, microbatch, index, chunks_per_rank // 2)
        )
        for rank in range(num_ranks)
    )
    return Schedule.of(rows, wave(num_ranks, chunks_per_rank))


def _pass(
    rank: int, num_ranks: int, microbatch: int, index: int, num_waves: int
) -> Iterator[tuple[int, Action]]:
    """Yield one micro-batch's slots and actions in wave `index` on one rank."""
    group, member = divmod(microbatch, num_ranks)
    last = num_waves - 1
    first_cell = group * num_ranks * num_waves + member
    forward = PERIOD * (first_cell + index * num_ranks)
    backward = PERIOD * (first_cell + (2 * last - index) * num_ranks)
    down, up = (2 * index * num_ranks + offset for offset in (rank, 2 * num_ranks - 1 - rank))
    turn = PERIOD * (num_ranks - 1)  # 4 slots per rank in one direction and 2 in the other
    yield forward + 4 * rank, Action(down, Kind.F, microbatch)
    yield forward + turn + 1 - 2 * rank, Action(up, Kind.F, microbatch)
    yield backward + turn + 2 + 4 * rank, Action(up, Kind.B, microbatch)
    yield backward + 2 * turn + 4 - 2 * rank, Action(down, Kind.B, microbatch)
