"""Streams and events of a real device, by the names that torch has for every kind of it.

This has not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.exactness.strided_copy import with_layout_of


class TorchAccelerator:
    """A device of torch's current accelerator: CUDA, ROCm, XPU and others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def rank_thread(self, action: Callable[[], object] | None = None) -> Iterator[None]:  # noqa: ARG002
        """Make it the device of this thread, for kernels and for tensors without a device."""
        with torch.accelerator.device_index(self.device.index):
            yield

    def new_stream(self, purpose: str) -> torch.Stream:  # noqa: ARG002  torch's have no names
        return torch.Stream(self.device)

    def queueing_on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return stream

    def record_event(self) -> torch.Event:
        event: torch.Event = self._current.record_event()
        return event

    def wait_event(self, event: torch.Event) -> None:
        self._current.wait_event(event)

    def keep_alive(self, tensor: Tensor) -> None:
        tensor.record_stream(self._current)

    def copy_from(self, tensor: Tensor, source: Accelerator) -> Tensor:  # noqa: ARG002
        return with_layout_of(tensor, tensor.to(self.device, non_blocking=True))

    def bring(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return self.upload(tensor)
        return with_layout_of(tensor, tensor.to(self.device, non_blocking=True))

    def upload(self, tensor: Tensor) -> Tensor:
        # from page-locked memory the host need not wait; torch keeps it until the copy is done
        copy = tensor.pin_memory().to(self.device, non_blocking=True)
        return with_layout_of(tensor, copy)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def record_time(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._current)
        return event

    def seconds_between(self, earlier: torch.Event, later: torch.Event) -> float:
        return earlier.elapsed_time(later) / 1e3  # of ms

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    @property
    def _current(self) -> Any:
        return torch.accelerator.current_stream(self.device)
