"""How fast a device multiplies matrices and moves memory."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

SIDE = 1024  # of the matrices: 2 GFLOP a product, which any device is busy with
AMOUNT = 2**26  # bytes that are copied: more than caches hold
REPEATS = 5


class Rates(NamedTuple):
    """By second."""

    flops: float
    bandwidth: float  # bytes, read or written


def measure_rates(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Rates:
    """Of a device, with as many threads as torch uses now; in under a second."""
    device = torch.device(device)
    matrix = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    source = torch.ones(AMOUNT, dtype=torch.uint8, device=device)
    copy = torch.ones_like(source)
    return Rates(
        flops=2 * SIDE**3 / _seconds(lambda: matrix @ matrix, device),
        bandwidth=2 * AMOUNT / _seconds(lambda: copy.copy_(source), device),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    work()  # memory and kernels are new to the process
    found = []
    for _ in range(REPEATS):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - start)
    return median(found)
