"""sl.measure_rates: measure how fast a device multiplies matrices and copies memory."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from stageline.runtime.accelerators.measured_devices import timed

MATRIX_SIZE = 1024  # 2 GFLOP per product, enough to keep any device busy
COPIED_BYTES = 2**26  # more than caches hold
REPEATS = 5


class DeviceRates(NamedTuple):
    """The speed of a device."""

    flops: float  # floating-point operations per second
    bandwidth: float  # bytes read or written per second


def measure_rates(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> DeviceRates:
    """Measure a device with torch's current number of threads; takes less than a second."""
    device = torch.device(device)
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device)
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    copy = torch.ones_like(source)
    return DeviceRates(
        flops=2 * MATRIX_SIZE**3 / _seconds(lambda: matrix @ matrix, device),
        bandwidth=2 * COPIED_BYTES / _seconds(lambda: copy.copy_(source), device),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some runs, after one that loads kernels and allocates memory."""
    work()
    times = []
    for _ in range(REPEATS):
        _, seconds = timed(work, device)
        times.append(seconds)
    return median(times)
