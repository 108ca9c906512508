"""Convert the memory limit that a user gives into a limit on each rank's activations."""

from __future__ import annotations

from math import inf

from stageline.arguments import check_type, shown
from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.schedules.placement import Placement
from stageline.units import format_bytes, parse_bytes

MOST_MICROBATCHES = 1e6  # a larger number is probably meant as bytes


def activation_limits(
    memory_limit: float | str | None, placement: Placement, costs: Costs
) -> tuple[float, ...]:
    """Return the limit on each rank's activations, in the unit of `costs.activation`.

    A number counts micro-batches: it is multiplied by the memory of one micro-batch on all stages
    of the rank. Text is bytes, such as "22GiB", from which parameters, gradients, optimizer state
    and the largest working set of recomputation are subtracted.
    """
    per_microbatch = costs.per_rank("activation", placement)
    if memory_limit is None:
        return (inf,) * len(per_microbatch)
    if isinstance(memory_limit, str):
        return _remaining_bytes(memory_limit, placement, costs, per_microbatch)
    check_type("memory_limit", memory_limit, (int, float), "micro-batches, or text like '22GiB'")
    if isinstance(memory_limit, bool) or not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit is {shown(memory_limit)} micro-batches, but a rank needs at least 1: "
            "use more, or bytes as text, such as '22GiB'"
        )
    if memory_limit > MOST_MICROBATCHES:
        raise ScheduleError(
            f"memory_limit is {shown(memory_limit)}, but a number counts micro-batches: "
            "write bytes as text, such as '22GiB', or use None for no limit"
        )
    return tuple(memory_limit * size for size in per_microbatch)


def _remaining_bytes(
    memory_limit: str, placement: Placement, costs: Costs, per_microbatch: list[float]
) -> tuple[float, ...]:
    try:
        total = parse_bytes(memory_limit)
    except ValueError as error:
        raise ScheduleError(f"memory_limit is not a number of bytes: {error}") from error
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
            w for w, own in zip(working, placement, strict=True) if own == rank
        )
        if total < taken + needed:
            raise ScheduleError(
                f"memory_limit is {format_bytes(total)}, but rank {rank} needs "
                f"{format_bytes(taken)} before its first activation and {format_bytes(needed)} for "
                f"one micro-batch: use at least {format_bytes(taken + needed)}"
            )
        limits.append(total - taken)
    return tuple(limits)
