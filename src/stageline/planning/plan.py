"""sl.plan: find the fastest configuration to train a profiled model that fits on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stageline.arguments import check_arguments, check_size
from stageline.errors import PlanError
from stageline.limits import MOST_SAMPLES, check_most
from stageline.planning.cluster.cluster import Cluster
from stageline.planning.partition.stage_costs import num_optimizer_states
from stageline.planning.plan_result import Plan
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.search.candidate_schedules import DEFAULT_SCHEDULES
from stageline.planning.search.search import PlanSearch
from stageline.planning.search.search_result import (
    alternatives,
    format_stages,
    nothing_fits_message,
)
from stageline.planning.search.training_layouts import PlanRequest
from stageline.schedules.build import family_of


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    optimizer: str = "adamw",
    num_ranks: int | None = None,
    schedules: Sequence[str] = DEFAULT_SCHEDULES,
    recompute: bool = True,
    progress: Callable[[int, str], None] | None = None,
) -> Plan:
    """Return the fastest plan for batches of this size that fits in the devices' memory.

    It chooses the ranks, replicas, cut, schedule, micro-batch size and recomputation; the plan says
    what to expect, and why other schedules lost. `num_ranks` and `schedules` restrict the choice,
    and `recompute=False` excludes recomputation. Asynchronous schedules, whose results differ from
    synchronous ones, and replicas of single stages are considered only if such a schedule is named.
    `progress` is called with the number of candidates tried so far, and the best time so far.
    """
    check_size("batch_size", batch_size)
    check_most("batch_size", batch_size, MOST_SAMPLES, error=PlanError)
    if num_ranks is not None:
        check_size("num_ranks", num_ranks)
    check_arguments(plan, locals(), PlanError)
    num_optimizer_states(optimizer)  # raises if it is unknown
    for name in schedules:
        family_of(name)  # raises if it is unknown
    request = PlanRequest(profile, cluster, batch_size, optimizer, num_ranks, recompute)
    return find_plan(request, schedules, progress or _ignore_progress)


def find_plan(
    request: PlanRequest, schedules: Sequence[str], progress: Callable[[int, str], None]
) -> Plan:
    """Return the fastest plan for a request; raise `PlanError` if nothing fits."""
    search = PlanSearch(request, schedules, progress)
    found = search.run()
    if not found:
        raise PlanError(why_nothing_fits(request, schedules, search))
    return found[0].to_plan(request, alternatives(found))


def why_nothing_fits(request: PlanRequest, schedules: Sequence[str], search: PlanSearch) -> str:
    """Return the message of a search that found nothing: what comes closest, and what would fit."""
    closest = search.closest[1] if search.closest else None
    return nothing_fits_message(request, closest, _recompute_advice(request, schedules))


def _recompute_advice(request: PlanRequest, schedules: Sequence[str]) -> str:
    """Return which stages to recompute so that a plan fits, if recomputation was not allowed."""
    if request.recompute:
        return ""
    found = PlanSearch(replace(request, recompute=True), schedules, _ignore_progress).run()
    return f"recompute {format_stages(found[0].candidate.cut.recompute)}, or use " if found else ""


def _ignore_progress(count: int, status: str) -> None:
    """Do nothing."""
