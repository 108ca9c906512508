"""A memory limit as the user says it, as activations for each rank."""

from __future__ import annotations

from math import inf

from stageline.arguments import check_type, shown
from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.schedules.placement import Placement
from stageline.units import format_bytes, parse_bytes

MOST_MICROBATCHES = 1e6  # nobody means so many: it is bytes that were given as a number


def activation_limits(
    memory_limit: float | str | None, placement: Placement, costs: Costs
) -> tuple[float, ...]:
    """For each rank, what its activations may take, in the unit of `costs.activation`.

    A number counts micro-batches: that many times what one takes on all stages of the rank. Text is
    bytes, such as "22GiB", of which parameters, gradients, optimizer state and the largest working
    set of recomputation are taken off first.
    """
    per_microbatch = costs.per_rank("activation", placement)
    if memory_limit is None:
        return (inf,) * len(per_microbatch)
    if isinstance(memory_limit, str):
        return _left_of_bytes(memory_limit, placement, costs, per_microbatch)
    check_type("memory_limit", memory_limit, (int, float), "micro-batches, or text like '22GiB'")
    if isinstance(memory_limit, bool) or not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit is {shown(memory_limit)} micro-batches, but a rank needs 1 or more to "
            "run: use more, or bytes as text, such as '22GiB'"
        )
    if memory_limit > MOST_MICROBATCHES:
        raise ScheduleError(
            f"memory_limit is {shown(memory_limit)}, but a number counts micro-batches: "
            "if these are bytes, write them as text, such as '22GiB'; None is no limit"
        )
    return tuple(memory_limit * size for size in per_microbatch)


def _left_of_bytes(
    memory_limit: str, placement: Placement, costs: Costs, per_microbatch: list[float]
) -> tuple[float, ...]:
    try:
        total = parse_bytes(memory_limit)
    except ValueError as error:
        raise ScheduleError(f"memory_limit does not say how much: {error}") from error
    largest = max(costs.per_stage("activation", len(placement)))
    if largest <= 1:
        raise ScheduleError(
            f"memory_limit is {shown(memory_limit)}, but an activation takes {largest:g} bytes: "
            "give costs with activation in bytes, or a limit in micro-batches"
        )
    static = costs.static(placement)
    working = costs.per_stage("working_set", len(placement))
    limits = []
    for rank, needed in enumerate(per_microbatch):
        taken = static[rank] + max(
            w for w, home in zip(working, placement, strict=True) if home == rank
        )
        if total < taken + needed:
            raise ScheduleError(
                f"memory_limit is {format_bytes(total)}, but rank {rank} needs "
                f"{format_bytes(taken)} before its first activation and {format_bytes(needed)} for "
                f"one micro-batch: use at least {format_bytes(taken + needed)}"
            )
        limits.append(total - taken)
    return tuple(limits)
