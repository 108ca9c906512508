"""Choose a balance by the measured time or memory of layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import nn

from stageline.errors import BalanceError
from stageline.model.layers import LayerSequence
from stageline.model.split import balanced_sizes
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import LayerCost
from stageline.torchgpipe.layers import layers_of
from stageline.torchgpipe.partitions import Device
from stageline.torchgpipe.tensors import Tensors, check_tensors

__all__ = ["balance_by_size", "balance_by_time"]

MOST_ROUNDS = 100


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensors,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Return a balance whose slowest partition takes the least time, forward and backward.

    Copies of the layers run on `device`, by default the current accelerator if there is one, in
    training mode, for about `timeout` seconds.
    """
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise BalanceError(
            "some parameters have gradients, but profiling copies the model without any: call "
            "zero_grad() first"
        )
    start = perf_counter()
    costs = _costs(module, sample, device)
    rounds = int(timeout / (perf_counter() - start))
    if rounds > 1:
        costs = _costs(module, sample, device, repeats=min(rounds, MOST_ROUNDS))
    return _balance([cost.time for cost in costs], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensors,  # noqa: A002  torchgpipe's name
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Return a balance whose largest partition needs the least memory.

    A layer needs its activations for one of `chunks` micro-batches of `input`, and `param_scale`
    times its parameters: 2 for them and their gradients, 3 with the momentum of SGD, 4 with Adam.
    `device` is where copies of the layers run, on CPU as well.
    """
    costs = _costs(module, input, device, chunks=chunks)
    return _balance([cost.activation + cost.parameters * param_scale for cost in costs], partitions)


def _costs(
    module: nn.Sequential,
    batch: Tensors,
    device: Device | None,
    *,
    chunks: int = 1,
    repeats: int = 1,
) -> Sequence[LayerCost]:
    check_tensors(batch, "sample")
    place = torch.device(device) if device is not None else _default_device()
    layers, _ = layers_of([copy.deepcopy(module).to(place).train()])
    inputs = _on(place, batch)
    first = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
    size = -(-len(first) // chunks)
    sequence = LayerSequence(tuple(layers))
    found = profile(sequence, inputs, sizes=[size], repeats=repeats, progress=False)
    return found.measurements[0].layers


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def _on(place: torch.device, batch: Tensors) -> Tensors:
    """Return a batch on a device, whose gradients are computed if those of the batch are."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().to(place).requires_grad_(batch.requires_grad)
    return tuple(tensor.detach().to(place).requires_grad_(tensor.requires_grad) for tensor in batch)


def _balance(costs: Sequence[float], partitions: int) -> list[int]:
    if not 1 <= partitions <= len(costs):
        raise BalanceError(
            f"there are to be {partitions} partitions, but {len(costs)} layers make from 1 to "
            f"{len(costs)}"
        )
    return balanced_sizes(costs, partitions)
