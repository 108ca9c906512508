"""Enumerate the candidates of a request: every layout with every schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from stageline.planning.partition.stage_costs import StageCut
from stageline.planning.partition.stage_replicas import replicated_cuts, round_up_microbatches
from stageline.planning.search.candidate import PlanCandidate, ScheduleShape
from stageline.planning.search.candidate_builder import CandidateBuilder
from stageline.planning.search.candidate_schedules import schedule_shape, schedules_with_chunks
from stageline.planning.search.training_layouts import (
    DeviceGrid,
    TrainingLayout,
    training_layouts,
)
from stageline.schedules.build import family_of
from stageline.schedules.placement import Replicas, side_by_side


def enumerate_candidates(
    builder: CandidateBuilder, schedules: Sequence[str]
) -> Iterator[PlanCandidate]:
    """Yield all candidates with these schedules, cut for speed; nothing is recomputed yet."""
    synchronous = [name for name in schedules if family_of(name).is_synchronous]
    asynchronous = [name for name in schedules if not family_of(name).is_synchronous]
    yield from _synchronous_candidates(builder, synchronous)
    for layout, cut in dict.fromkeys(_asynchronous_layouts(builder)) if asynchronous else ():
        shape = ScheduleShape(cut.placement, in_halves=False, is_asynchronous=True)
        yield from (builder.build(layout, name, shape, cut) for name in asynchronous)


def _synchronous_candidates(
    builder: CandidateBuilder, schedules: Sequence[str]
) -> Iterator[PlanCandidate]:
    shape_of = cache(schedule_shape)
    for layout in training_layouts(builder.request):
        for name, chunks in schedules_with_chunks(schedules, layout.num_ranks):
            shape = shape_of(name, layout.num_ranks, chunks)
            if len(builder.request.profile.names) < len(shape.placement):
                continue
            balance = builder.even_balance(builder.speeds(layout.grid), shape.placement)
            yield builder.build(layout, name, shape, _plain_cut(balance, shape.placement))


def _asynchronous_layouts(
    builder: CandidateBuilder,
) -> Iterator[tuple[TrainingLayout, StageCut]]:
    """Yield layouts of one pipeline over all devices, whose stages may have replicas.

    The number of micro-batches is a multiple of the ranks of every stage.
    """
    request, num_ranks = builder.request, builder.request.cluster.num_devices
    if num_ranks == 1 or request.num_ranks not in (None, num_ranks):
        return

    def grid_of(stage_replicas: Replicas) -> DeviceGrid:
        return DeviceGrid(num_ranks, 1, side_by_side=False, stage_replicas=stage_replicas)

    def cut_evenly(replicas: Replicas) -> tuple[int, ...]:
        return builder.even_balance(builder.speeds(grid_of(replicas)), side_by_side(replicas))

    for size in request.sizes_to_try(request.batch_size):
        wanted = math.ceil(request.batch_size / size)
        cuts = replicated_cuts(builder.measurement(size), request.cluster, wanted, cut_evenly)
        for replicas, balance in cuts:
            count = round_up_microbatches(replicas, wanted)
            if count <= request.batch_size:
                grid = grid_of(replicas if max(replicas) > 1 else ())
                layout = TrainingLayout(grid, math.ceil(request.batch_size / count), count)
                yield layout, _plain_cut(balance, side_by_side(replicas))


def _plain_cut(balance: tuple[int, ...], placement: tuple[int, ...]) -> StageCut:
    """Return a cut without recomputation."""
    return StageCut(balance, placement, (False,) * len(balance))
