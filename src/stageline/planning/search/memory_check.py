"""Check whether the ranks of a candidate have enough memory.

The peak of a rank follows from the order of its actions alone, so memory is checked before time is
simulated. `reduce_memory.py` has what is tried if a candidate does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.search.candidate import PlanCandidate
from stageline.report.memory import peak_memory
from stageline.schedules.schedule import Schedule


def peak_bytes(candidate: PlanCandidate, schedule: Schedule) -> tuple[float, ...]:
    """Return the peak memory of each rank."""
    return peak_memory(schedule.actions, schedule.placement, candidate.costs, schedule.replicas)


def excess_bytes(
    candidate: PlanCandidate, schedule: Schedule, devices: RankDevices
) -> tuple[float, ...]:
    """Return for each rank the peak memory minus the memory of its device; at most 0 if it fits."""
    return _subtract_memory(peak_bytes(candidate, schedule), devices)


def excess_bytes_from_fewer_ranks(
    candidate: PlanCandidate, schedule: Schedule, devices: RankDevices
) -> tuple[float, ...]:
    """Estimate the same by a schedule of fewer ranks: what a rank holds grows with their number."""
    scale = candidate.layout.num_ranks / schedule.num_ranks
    peaks = peak_memory(schedule.actions, schedule.placement, candidate.mean_costs(scale))
    ranks = range(candidate.layout.num_ranks)
    return _subtract_memory([peaks[int(rank / scale)] for rank in ranks], devices)


def _subtract_memory(peaks: Sequence[float], devices: RankDevices) -> tuple[float, ...]:
    pairs = zip(peaks, devices.devices, strict=True)
    return tuple(peak - device.memory_bytes for peak, device in pairs)
