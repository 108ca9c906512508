"""A memory limit as the user says it, as activations for each rank."""

from __future__ import annotations

from math import inf

from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.schedules.placement import Placement
from stageline.units import format_bytes, parse_bytes

STATIC = ("parameters", "gradients", "optimizer_state")
MOST_MICROBATCHES = 1e6  # nobody means so many: it is bytes that were given as a number


def activation_limits(
    memory_limit: float | str | None, placement: Placement, costs: Costs
) -> tuple[float, ...]:
    """For each rank, what its activations may take, in the unit of `costs.activation`.

    A number counts micro-batches: that many times what one takes on all stages of the rank. Text is
    bytes, such as "22GiB", of which parameters, gradients, optimizer state and the largest working
    set of recomputation are taken off first.
    """
    per_microbatch = _by_rank(placement, costs, "activation")
    if memory_limit is None:
        return (inf,) * len(per_microbatch)
    if isinstance(memory_limit, str):
        return _left_of_bytes(memory_limit, placement, costs, per_microbatch)
    if not 1 <= memory_limit <= MOST_MICROBATCHES:
        raise ScheduleError(
            f"memory_limit is {memory_limit} micro-batches, but a rank needs 1 or more to run: "
            "use a number of micro-batches, or bytes as text, such as '22GiB'"
        )
    return tuple(memory_limit * size for size in per_microbatch)


def _left_of_bytes(
    memory_limit: str, placement: Placement, costs: Costs, per_microbatch: list[float]
) -> tuple[float, ...]:
    try:
        total = parse_bytes(memory_limit)
    except ValueError as error:
        raise ScheduleError(f"memory_limit is {error}") from error
    static = [
        sum(sizes) for sizes in zip(*(_by_rank(placement, costs, f) for f in STATIC), strict=True)
    ]
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


def _by_rank(placement: Placement, costs: Costs, name: str) -> list[float]:
    totals = [0.0] * (max(placement) + 1)
    for rank, size in zip(placement, costs.per_stage(name, len(placement)), strict=True):
        totals[rank] += size
    return totals
