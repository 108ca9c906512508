"""Activations that wait for their backward move to host memory, and come back ahead of their use.

    forward:   put ── copy out, on a side stream ──►  host
    one action before the backward:   fetch ── copy in, on the side stream ──►  device
    backward:  take ── waits for the copy only

Where the device is the host there is nothing to move. What a device's memory can do stands behind
`HostMemory`; CUDA's is thin, and has not run on hardware.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class HostMemory(Protocol):
    """How one device's tensors leave and come back."""

    def park(self, tensor: Tensor) -> Any:
        """Start to copy a tensor out; gives back what stands for it."""

    def fetch(self, parked: Any) -> Any:
        """Start to copy it in again; gives back what stands for that."""

    def take(self, fetched: Any) -> Tensor:
        """The tensor on its device, once the copy has arrived."""


class Parking:
    """The saved tensors of one forward. State: where each of them is."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.parked: dict[int, Any] = {}  # by ticket: on the host
        self.fetched: dict[int, Any] = {}  # on the way back, or there
        self.num_tickets = 0

    def put(self, tensor: Tensor) -> Tensor | int:
        """What autograd keeps in place of a tensor. Weights stay: they are there anyway."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):  # noqa: SLF001
            return tensor
        ticket, self.num_tickets = self.num_tickets, self.num_tickets + 1
        self.parked[ticket] = self.memory.park(tensor)
        return ticket

    def fetch(self) -> None:
        """Start to bring all of them back, those first that the backward needs first."""
        for ticket in sorted(self.parked, reverse=True):
            self.fetched[ticket] = self.memory.fetch(self.parked.pop(ticket))

    def take(self, kept: Tensor | int) -> Tensor:
        """What autograd asks for in the backward; a backward in halves asks twice."""
        if isinstance(kept, Tensor):
            return kept
        if kept in self.parked:
            self.fetched[kept] = self.memory.fetch(self.parked.pop(kept))
        return self.memory.take(self.fetched[kept])


class PinnedMemory:
    """CUDA: page-locked host memory, and a stream of its own so that copies overlap compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def park(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory is not reused before it is copied
        return host

    def fetch(self, parked: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            tensor = parked.to(self.device, non_blocking=True)
            return tensor, self.stream.record_event()

    def take(self, fetched: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        tensor, arrived = fetched
        now = torch.cuda.current_stream(self.device)
        now.wait_event(arrived)
        tensor.record_stream(now)
        return tensor


def host_memory(device: torch.device) -> HostMemory | None:
    """None where tensors are in host memory already."""
    return PinnedMemory(device) if device.type == "cuda" else None
