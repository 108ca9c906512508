"""The global norm of gradients, and clipping to it with the bits of `clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stageline.runtime.backends.backend import Collectives, Group
from stageline.runtime.engine.replicas import local
from stageline.runtime.exactness.gradient_types import FLOATING_TYPES
from stageline.runtime.placement.layout import Layout

Norms = dict[int, Tensor]  # of gradients, by the number of the parameter in the model


def clip_grad_norm(layout: Layout, collectives: Collectives, max_norm: float) -> Tensor:
    """Scale the gradients of all ranks to a global norm; return the norm that they had."""
    own = gradient_norms(layout.counted_on(layout.ranks_here))
    if collectives.size(Group.PIPELINE) == 1:  # all are here, maybe on several devices
        device = next((norm.device for norm in own.values()), None)
        norms = [norm.to(device) for norm in own.values()]
    else:
        arrive = exchange_norms(own, len(layout.parameter_numbers), collectives)
        norms = list(arrive().values())
    scale_(layout.parameters(), clip_factor(norms, max_norm))
    return total_norm(norms)


def gradient_norms(parameters: Mapping[int, nn.Parameter]) -> Norms:
    """Return the norm of each parameter that has a gradient."""
    return {n: gradient_norm(p.grad) for n, p in parameters.items() if p.grad is not None}


def gradient_norm(gradient: Tensor) -> Tensor:
    norm = gradient.norm()
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def exchange_norms(
    own: Mapping[int, Tensor], count: int, collectives: Collectives
) -> Callable[[], Norms]:
    """Start to exchange norms with all ranks; call the result for those of all.

    They are sums over ranks: each norm is that of one rank plus zeros, so exact. So is its type:
    ranks may have weights of different types. From devices, types are summed in host memory, which
    waits for no device.
    """
    norms = torch.zeros(count, dtype=torch.float64, device=collectives.device)
    types = np.zeros(count)  # 0: that parameter has no gradient
    for number, norm in own.items():
        norms[number], types[number] = norm, 1.0 + FLOATING_TYPES.index(norm.dtype)
    if collectives.device is None:
        table = torch.stack([norms, torch.from_numpy(types)])
        arrive = collectives.all_reduce(table, "norms", Group.PIPELINE)
        return lambda: _in_their_types(arrive()[0], table[1].tolist())
    arrive = collectives.all_reduce(norms, "norms", Group.PIPELINE)
    arrive_types = collectives.all_reduce(torch.from_numpy(types), "norms", Group.PIPELINE)

    def arrived() -> Norms:
        arrive_types()
        return _in_their_types(arrive(), types.tolist())

    return arrived


def _in_their_types(norms: Tensor, types: Sequence[float]) -> Norms:
    pairs = enumerate(zip(norms, types, strict=True))
    return {n: norm.to(FLOATING_TYPES[int(kind) - 1]) for n, (norm, kind) in pairs if kind}


def total_norm(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def clip_factor(norms: list[Tensor], max_norm: float) -> Tensor:
    """Return what to scale gradients by, as torch.nn.utils does; not finite if they are not."""
    total = total_norm(norms)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(total), factor, total)  # no host has to know which


def scale_(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(parameter.device))
