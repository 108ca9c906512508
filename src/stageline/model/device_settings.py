"""What torch keeps for each kind of device: random generators, and whether autocast is on.

The CPU is always one of them, and torch's current accelerator, of whatever kind, the other.

A generator of a GPU is a seed and an offset in host memory, which a kernel gets when it is queued.
So to read, set or seed it neither waits for the device nor needs an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

HOST = ("cpu", "meta")  # kinds that draw from the CPU's generator, or not at all


class DefaultGenerator(Protocol):
    """A generator that operators draw from if they are given none: a `torch.Generator`, mostly."""

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor) -> Any: ...

    def manual_seed(self, seed: int) -> Any: ...


class OnlyGenerator:
    """The generator of a kind of device of which there is one, such as MPS.

    Its module has functions for the generator, but not the generator.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def get_state(self) -> Tensor:
        state: Tensor = self.module.get_rng_state()
        return state

    def set_state(self, state: Tensor) -> None:
        self.module.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self.module.manual_seed(seed)


def device_types() -> tuple[str, ...]:
    """Return the kinds of devices that layers may run on."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def with_index(device: torch.device) -> torch.device:
    """Return a device with its number: torch means the current one if there is none."""
    index: int | None = device.index  # torch's stub says that it is always there
    if index is not None or device.type in HOST:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def default_generators(device: torch.device | None) -> list[DefaultGenerator]:
    """Return the generators that operators on a device draw from: the CPU's, and its own."""
    if device is None or device.type in HOST:
        return [torch.default_generator]
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "default_generators"):
        return [torch.default_generator, OnlyGenerator(module)]
    if not module.default_generators:
        module.init()  # which fills them
    return [torch.default_generator, module.default_generators[with_index(device).index]]


def generators_in_use() -> list[DefaultGenerator]:
    """Return the default generators of the CPU and of all devices, if any has been used."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return [torch.default_generator]
    module: Any = torch.get_device_module(accelerator)
    if hasattr(module, "default_generators"):
        return [torch.default_generator, *module.default_generators]
    own = [OnlyGenerator(module)] if module.is_available() else []
    return [torch.default_generator, *own]


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the default generators of the CPU and of all devices as they were."""
    generators = generators_in_use()
    before = states(generators)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def seed_generators(seed: int) -> None:
    """Seed the default generators of the CPU and of all devices, if any has been used.

    `torch.manual_seed` seeds devices as well that are used later, over a seed of the caller's.
    """
    for generator in generators_in_use():
        generator.manual_seed(seed)


def states(generators: Sequence[DefaultGenerator]) -> list[Tensor]:
    """Return the state of each generator."""
    return [generator.get_state() for generator in generators]
