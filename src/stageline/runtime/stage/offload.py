"""Move saved activations to host memory until their backward, and fetch them ahead of their use.

    forward:   pack ── copy out, on a side stream ──►  host
    one action before the backward:   fetch ── copy in, on the side stream ──►  device
    backward:  unpack ── waits for the copy only

On a CPU there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.exactness.strided_copy import laid_out, layout_of
from stageline.torch_private import storage_identity, view_base


class Offloader(Protocol):
    """Copies of one device's tensors in host memory."""

    def copy_out(self, tensor: Tensor) -> Any:
        """Start to copy a tensor to the host; return a handle for it."""

    def copy_in(self, on_host: Any) -> Any:
        """Start to copy it back to the device; return a handle for that copy."""

    def wait(self, on_device: Any) -> Tensor:
        """Return the tensor on its device, once the copy has arrived."""


class OffloadedTensors:
    """The saved tensors of one forward. State: where each of them is.

    `kept` are identities of memory that stays where it is: layers write to it after it was saved.
    """

    def __init__(self, memory: Offloader, *kept: Container[int]) -> None:
        self.memory, self.kept = memory, kept
        self.on_host: dict[int, Any] = {}  # by number, in the order in which they were saved
        self.on_device: dict[int, Any] = {}  # copied back, or about to be
        self.num_tensors = 0

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Return what autograd keeps instead of a tensor; weights stay where they are."""
        if isinstance(tensor, nn.Parameter) or isinstance(view_base(tensor), nn.Parameter):
            return tensor
        identity = storage_identity(tensor)
        if any(identity in kept for kept in self.kept):
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


class OnHost(NamedTuple):
    """A copy in host memory, and the strides and the alignment of the original."""

    copy: Tensor
    layout: tuple[tuple[int, ...], int]


class HostMemory:
    """Copies of one rank's tensors in host memory, made on a stream of their own."""

    def __init__(self, accelerator: Accelerator, stage: int) -> None:
        self.accelerator = accelerator
        self.stream = accelerator.new_stream(f"offload of stage {stage}")

    def copy_out(self, tensor: Tensor) -> OnHost:
        accelerator = self.accelerator
        made = accelerator.record_event()
        with accelerator.queueing_on(self.stream):
            accelerator.wait_event(made)
            accelerator.keep_alive(tensor)
            return OnHost(accelerator.download(tensor), layout_of(tensor))

    def copy_in(self, on_host: OnHost) -> tuple[Tensor, Any]:
        with self.accelerator.queueing_on(self.stream):
            on_device = laid_out(self.accelerator.upload(on_host.copy), on_host.layout)
            return on_device, self.accelerator.record_event()

    def wait(self, on_device: tuple[Tensor, Any]) -> Tensor:
        tensor, arrived = on_device
        self.accelerator.wait_event(arrived)
        self.accelerator.keep_alive(tensor)
        return tensor
