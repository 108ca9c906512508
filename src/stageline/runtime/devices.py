"""The device of each rank. On CPU there is nothing to do; CUDA's part has not run on hardware."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from stageline.errors import ModelError
from stageline.model.device_settings import with_index
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.accelerators.simulation import Simulation
from stageline.runtime.accelerators.torch_accelerator import TorchAccelerator

Device = torch.device | str


def by_rank(devices: Sequence[Device] | None, num_ranks: int) -> tuple[torch.device | None, ...]:
    """Return each rank's device, or None for each to leave layers and tensors where they are."""
    if devices is None:
        return (None,) * num_ranks
    if isinstance(devices, str | torch.device):
        raise ModelError(f"devices is {devices!r}, but has to be a list with one for each rank")
    if len(devices) != num_ranks:
        raise ModelError(
            f"devices has {len(devices)} entries, but there are {num_ranks} ranks: give one each"
        )
    try:
        return tuple(torch.device(device) for device in devices)
    except RuntimeError as error:
        raise ModelError(
            f"devices is {list(devices)}, but torch does not know them all: give names such as "
            "'cpu' or 'cuda:0', one for each rank"
        ) from error


def accelerators_of(
    devices: Sequence[torch.device | None], *, simulated: bool
) -> tuple[Accelerator | None, ...]:
    """Return each rank's accelerator, or None for one that computes on the CPU.

    `simulated` gives ranks on the CPU an accelerator that checks the order of its streams: ranks
    without a device one each, others one for each device.
    """
    by_device: dict[object, Accelerator] = {}
    simulation = Simulation() if simulated else None
    found = []
    for rank, given in enumerate(devices):
        device = None if given is None else with_index(given)
        key = rank if device is None else device
        if key not in by_device and (own := _accelerator(rank, device, simulation)):
            by_device[key] = own
        found.append(by_device.get(key))
    return tuple(found)


def _accelerator(
    rank: int, device: torch.device | None, simulation: Simulation | None
) -> Accelerator | None:
    if device is not None and device.type != "cpu":
        here = torch.accelerator.current_accelerator()
        return TorchAccelerator(device) if here and here.type == device.type else None
    if simulation is None:
        return None
    return CheckedAccelerator(f"the device of rank {rank}", simulation)


def watching_caller(accelerators: Sequence[Accelerator | None]) -> AbstractContextManager[object]:
    """Return a context in which simulated devices check what the caller's thread does, too."""
    checked = (each for each in accelerators if isinstance(each, CheckedAccelerator))
    first = next(checked, None)
    return first.rank_thread() if first else nullcontext()


class StreamCheck(NamedTuple):
    """How much simulated devices have checked so far."""

    num_accesses: int
    num_streams: int

    def __str__(self) -> str:
        return f"{self.num_accesses:,} accesses on {self.num_streams} streams, all ordered"


def stream_check(accelerators: Sequence[Accelerator | None]) -> StreamCheck:
    """Return how much has been checked; an access that nothing orders has raised."""
    simulations = {a.simulation for a in accelerators if isinstance(a, CheckedAccelerator)}
    streams = (stream for each in simulations for stream in each.streams if stream.num_queued)
    return StreamCheck(sum(each.num_accesses for each in simulations), sum(1 for _ in streams))


def current(device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which new tensors and kernels of a rank's thread go to its own GPU."""
    is_cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if is_cuda else nullcontext()
