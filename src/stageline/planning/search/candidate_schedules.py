"""Build the schedules of candidates, and tell their shape before they are built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.planning.search.candidate import ScheduleShape
from stageline.schedules.action import Kind
from stageline.schedules.build import build_schedule, family_of, schedule_names
from stageline.schedules.placement import Replicas, loop, wave
from stageline.schedules.schedule import Schedule

DEFAULT_SCHEDULES = tuple(name for name in schedule_names(synchronous=True) if name != "naive")
CHUNKS = (2, 4)  # stages per rank to try, for schedules where that can be chosen


def schedules_with_chunks(names: Sequence[str], num_ranks: int) -> Iterator[tuple[str, int]]:
    """Yield each schedule with each number of stages per rank; on one rank all are the same."""
    if num_ranks == 1:
        yield "1f1b", 1
        return
    for name in names:
        family = family_of(name)
        if "chunks_per_rank" in family.options:
            yield from ((name, chunks) for chunks in CHUNKS)
        else:
            yield name, family.chunks


def schedule_shape(name: str, num_ranks: int, chunks: int) -> ScheduleShape:
    """Return the shape of a synchronous schedule, known from a small one on two ranks."""
    small = build_sized(name, 2, 4, chunks)
    placement = loop if small.placement == loop(2, chunks) else wave
    in_halves = any(action.kind is Kind.I for row in small.actions for action in row)
    return ScheduleShape(placement(num_ranks, chunks), in_halves)


def build_sized(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    costs: Costs | None = None,
    stage_replicas: Replicas = (),
) -> Schedule:
    """Build a schedule of any family; raise `ScheduleError` if it cannot have these sizes."""
    family = family_of(name)
    sizes: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    if family.is_synchronous:
        given = chunks if "chunks_per_rank" in family.options else None
        return build_schedule(name, **sizes, chunks_per_rank=given, costs=costs)
    replicas = stage_replicas if stage_replicas and max(stage_replicas) > 1 else None
    until_full = math.ceil(num_ranks / num_microbatches)
    # further mini-batches show the period: the first may be shorter, and then two may alternate
    num_minibatches = until_full + max(4, 2 * until_full + 1)
    return build_schedule(name, **sizes, replicas=replicas, num_minibatches=num_minibatches)


def try_build_sized(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    costs: Costs | None = None,
    stage_replicas: Replicas = (),
) -> Schedule | None:
    """Return None if a schedule cannot have these sizes: some need a multiple of the ranks."""
    try:
        return build_sized(name, num_ranks, num_microbatches, chunks, costs, stage_replicas)
    except ScheduleError:
        return None
