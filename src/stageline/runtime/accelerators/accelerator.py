"""The interface to a device whose work is queued: all that Stageline asks of streams and events.

    stream A │ write x ── event ──┐              what is queued on one stream runs in order;
    stream B │            wait ───┴─► read x     streams run beside each other, unless one waits

The host does not wait for any of it. `torch_accelerator.py` is the real one, and
`checked_accelerator.py` simulates streams on a CPU and raises where an event is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Accelerator(Protocol):
    """A device of one rank. Each thread has a current stream, which its work is queued on."""

    device: torch.device

    def rank_thread(
        self, action: Callable[[], object] | None = None
    ) -> AbstractContextManager[object]:
        """Return a context in which a rank's thread works on this device.

        `action` returns what the rank does at the moment, for errors.
        """

    def new_stream(self, purpose: str) -> Any:
        """Return another stream of the device; `purpose` names it in errors."""

    def queueing_on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which a stream is this thread's current one."""

    def record_event(self) -> Any:
        """Return an event that occurs when all that is queued on the current stream is done."""

    def wait_event(self, event: Any) -> None:
        """Let the current stream wait for an event, which may be another device's."""

    def keep_alive(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has done what it is about to queue.

        Memory is reused in the order of the stream that it was allocated on, which knows nothing of
        other streams.
        """

    def copy_from(self, tensor: Tensor, source: Accelerator) -> Tensor:
        """Return a copy of another device's tensor, made on the current streams of both.

        Copies to a device have the strides and the alignment of their originals.
        """

    def bring(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the caller's on this device: itself, or a copy if it is elsewhere."""

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, made on the current stream."""

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy in page-locked host memory; it is there when the current stream is done.

        It may be denser than the tensor: a copy with gaps would make the host wait.
        """

    def record_time(self) -> Any:
        """Return an event that will hold the device's time when the current stream is there."""

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Return the time between two events of `record_time` that have occurred."""

    def synchronize(self) -> None:
        """Let the host wait until the device has nothing to do: never within a step."""
