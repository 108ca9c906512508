"""Change candidates that do not fit: recompute, offload, or cut the layers for memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stageline.errors import PlanError
from stageline.planning.partition.memory_bound import MemoryBound
from stageline.planning.partition.partition import partition_layers
from stageline.planning.partition.stage_costs import StageCut
from stageline.planning.search.candidate import PlanCandidate
from stageline.planning.search.candidate_builder import CandidateBuilder
from stageline.schedules.schedule import Schedule


def reduce_memory(
    builder: CandidateBuilder, candidate: PlanCandidate, schedule: Schedule, excess: Sequence[float]
) -> list[PlanCandidate]:
    """Return candidates that need less memory, given by how much each rank exceeds its memory."""
    return recompute_or_offload(builder, candidate, excess) or _cut_for_memory(
        builder, candidate, schedule, excess
    )


def recompute_or_offload(
    builder: CandidateBuilder, candidate: PlanCandidate, excess: Sequence[float]
) -> list[PlanCandidate]:
    """Return candidates with the same stages, recomputed where ranks are too full, or offloaded."""
    cuts, old = [], candidate.cut
    if builder.request.cluster.host_bandwidth and old.keeps_activations:
        cuts.append(replace(old, offload=True))
    if builder.request.recompute:
        # the first rank of a stage stands for all of them
        too_full = [excess[rank] > 0 for rank in candidate.shape.placement]
        cuts += _recomputed(old, too_full, builder.saves_time(candidate))
    return [builder.with_cut(candidate, cut) for cut in cuts]


def _recomputed(
    cut: StageCut, too_full: Sequence[bool], saves_time: Sequence[bool]
) -> list[StageCut]:
    """Recompute more of the stages that are too full, none if all of them are recomputed wholly.

    A stage is recomputed selectively first if that saves time, and wholly if it is still too full.
    """
    rows = enumerate(zip(too_full, cut.recompute, saves_time, strict=True))
    selective = tuple(
        (full and not before and saves) or (cut.is_selective(stage) and not full)
        for stage, (full, before, saves) in rows
    )
    changed = replace(
        cut,
        recompute=tuple(a or b for a, b in zip(cut.recompute, too_full, strict=True)),
        selective=selective if any(selective) else (),
    )
    return [changed] if changed != cut else []


def _cut_for_memory(
    builder: CandidateBuilder, candidate: PlanCandidate, schedule: Schedule, excess: Sequence[float]
) -> list[PlanCandidate]:
    """Return candidates with other stages that fit, with and without recomputation."""
    if candidate.cut.is_cut_for_memory:
        return []
    if not candidate.shape.is_asynchronous and sum(excess) > 0:
        return []  # no cut needs less memory on all ranks together
    choices = (False, True) if builder.request.recompute else (False,)
    cuts = [_fitting_cut(builder, candidate, schedule, recompute=choice) for choice in choices]
    return [builder.with_cut(candidate, cut) for cut in cuts if cut]


def _fitting_cut(
    builder: CandidateBuilder, candidate: PlanCandidate, schedule: Schedule, *, recompute: bool
) -> StageCut | None:
    """Return the fastest cut that fits in memory, or None if none does."""
    placement, grid = candidate.shape.placement, candidate.layout.grid
    measurement = builder.measurement(candidate.layout.microbatch_size)
    bound = MemoryBound.of(
        measurement,
        schedule,
        builder.devices(grid),
        builder.request.optimizer,
        recompute=recompute,
    )
    try:
        times = measurement.times_in_stage
        balance = partition_layers(times, placement, builder.speeds(grid), bound.fits)
    except PlanError:
        return None
    return StageCut(balance, placement, (recompute,) * len(balance), is_cut_for_memory=True)
