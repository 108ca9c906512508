"""Name the parameters and buffers of a model, and give zeros for those on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def state_names(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers by identity: the first, if they have several."""
    found: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        found.setdefault(id(tensor), name)
    return found


def without_meta(model: nn.Module, names: dict[int, str]) -> dict[int, Tensor]:
    """Return zeros for tensors on the meta device, which take no memory, and name them alike."""
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            number = torch.zeros((), dtype=tensor.dtype)
            number.requires_grad_(tensor.requires_grad)
            found[id(tensor)] = filled = number.expand(tensor.shape)
            names[id(filled)] = names[id(tensor)]
    return found
