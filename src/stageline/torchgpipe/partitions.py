"""Split an `nn.Sequential` into partitions, each with its device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stageline.errors import BalanceError, ModelError

Device = torch.device | int | str


def verify_module(module: object) -> None:
    """Raise unless a module is an `nn.Sequential` whose layers share no modules or parameters."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"the module is of type {type(module).__name__}, but GPipe splits an nn.Sequential: "
            "use that, or sl.Pipeline, which takes a list of sl.Layer"
        )
    if len({*module}) != len(module):
        raise ModelError(
            "some layer is in the module twice, but GPipe has each layer on one device: make a "
            "second one, or use sl.Pipeline, which allows it"
        )
    by_layer = [{*layer.parameters()} for layer in module]
    if len(set[nn.Parameter]().union(*by_layer)) != sum(map(len, by_layer)):
        raise ModelError(
            "some layers share a parameter, but GPipe has each parameter on one device: untie "
            "them, or use sl.Pipeline, which adds up the gradients of tied weights"
        )


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: Sequence[torch.device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Return the partitions, each moved to its device, the balance, and the devices in use."""
    sizes = [*balance]
    if sum(sizes) != len(module):
        raise BalanceError(
            f"balance is {sizes}, which adds up to {sum(sizes)} layers, but the module has "
            f"{len(module)}"
        )
    if any(size <= 0 for size in sizes):
        raise BalanceError(f"balance is {sizes}, but each partition needs at least one layer")
    if len(sizes) > len(devices):
        raise IndexError(
            f"there are {len(devices)} devices, but {len(sizes)} partitions: give one for each, "
            f"such as devices={['cpu'] * len(sizes)} (the default is all CUDA devices)"
        )
    layers = iter(module.named_children())
    partitions = nn.ModuleList()
    for size, device in zip(sizes, devices, strict=False):
        partition = nn.Sequential(OrderedDict(next(layers) for _ in range(size)))
        partitions.append(partition.to(device))
    return partitions, sizes, [*devices[: len(sizes)]]
