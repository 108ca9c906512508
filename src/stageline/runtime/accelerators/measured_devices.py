"""Measure time and memory on a device, of whatever kind; on the CPU that is the host's.

This has not run on hardware.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from stageline.runtime.accelerators.torch_accelerator import TorchAccelerator

T = TypeVar("T")
WAITED = "synchronizing CUDA operation"  # torch's words


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the device that tensors are on, or None if all are in host memory."""
    return next((tensor.device for tensor in tensors if is_accelerator(tensor.device)), None)


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device works asynchronously to the host, and has memory of its own."""
    return device.type not in ("cpu", "meta")


def timed(work: Callable[[], T], device: torch.device | None) -> tuple[T, float]:
    """Return a result, and the seconds that it took.

    On a device that is the time between two events, around which the host waits for the device. It
    includes gaps in which the device waits for the host, as they would be in a pipeline.
    """
    if device is None or not is_accelerator(device):
        start = perf_counter()
        result = work()
        return result, perf_counter() - start
    accelerator = TorchAccelerator(device)
    accelerator.synchronize()
    begin = accelerator.record_time()
    result = work()
    end = accelerator.record_time()
    accelerator.synchronize()
    return result, accelerator.seconds_between(begin, end)


def cuda_waits(step: Callable[[], object]) -> list[str] | None:
    """Return the lines of code in which torch waited for a device; None without CUDA.

    Only waits within operators are seen, such as that of `Tensor.item`.
    """
    is_seen = torch.cuda.is_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_seen:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if is_seen:
                torch.cuda.set_sync_debug_mode("default")
    found = [f"{each.filename}:{each.lineno}" for each in caught if WAITED in str(each.message)]
    return found if is_seen else None


def peak_bytes(devices: Iterable[torch.device]) -> int | None:
    """Return the most bytes that tensors had on devices; None without a device."""
    found = [*filter(is_accelerator, devices)]
    return sum(map(torch.accelerator.max_memory_allocated, found)) if found else None


def device_memory() -> int | None:
    """Return the bytes of memory of the current device; None without a device."""
    if not torch.accelerator.is_available():
        return None
    _, total = torch.accelerator.get_memory_info()
    return total


def device_name(device: torch.device) -> str:
    """Return the name that a device's maker gave it, or else torch's."""
    module = torch.get_device_module(device)
    name: str = (
        module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    )
    return name
