"""Move saved activations to host memory until their backward, and fetch them ahead of their use.

    forward:   pack ── copy out, on a side stream ──►  host
    one action before the backward:   fetch ── copy in, on the side stream ──►  device
    backward:  unpack ── waits for the copy only

On a CPU there is nothing to move. `HostMemory` is what a device has to provide; the one of CUDA is
small, and has not run on hardware.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stageline.torch_private import view_base


class HostMemory(Protocol):
    """Copies of one device's tensors in host memory."""

    def copy_out(self, tensor: Tensor) -> Any:
        """Start to copy a tensor to the host; return a handle for it."""

    def copy_in(self, on_host: Any) -> Any:
        """Start to copy it back to the device; return a handle for that copy."""

    def wait(self, on_device: Any) -> Tensor:
        """Return the tensor on its device, once the copy has arrived."""


class OffloadedTensors:
    """The saved tensors of one forward. State: where each of them is."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.on_host: dict[int, Any] = {}  # by number, in the order in which they were saved
        self.on_device: dict[int, Any] = {}  # copied back, or about to be
        self.num_tensors = 0

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Return what autograd keeps instead of a tensor; weights stay where they are."""
        if isinstance(tensor, nn.Parameter) or isinstance(view_base(tensor), nn.Parameter):
            return tensor
        number, self.num_tensors = self.num_tensors, self.num_tensors + 1
        self.on_host[number] = self.memory.copy_out(tensor)
        return number

    def fetch(self) -> None:
        """Start to copy all of them back, beginning with those that the backward needs first."""
        for number in sorted(self.on_host, reverse=True):
            self.on_device[number] = self.memory.copy_in(self.on_host.pop(number))

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Return the tensor for autograd's backward; a split backward asks for it twice."""
        if isinstance(packed, Tensor):
            return packed
        if packed in self.on_host:
            self.on_device[packed] = self.memory.copy_in(self.on_host.pop(packed))
        return self.memory.wait(self.on_device[packed])


class PinnedMemory:
    """Page-locked host memory of CUDA, with a stream of its own so that copies overlap compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_out(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory is not reused before it is copied
        return host

    def copy_in(self, on_host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            tensor = on_host.to(self.device, non_blocking=True)
            return tensor, self.stream.record_event()

    def wait(self, on_device: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        tensor, arrived = on_device
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        return tensor


def host_memory(device: torch.device) -> HostMemory | None:
    """Return the host memory of a device, or None if its tensors are in host memory already."""
    return PinnedMemory(device) if device.type == "cuda" else None
