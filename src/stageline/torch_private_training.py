"""Private names of torch for loss scaling and sharded weights, as `torch_private.py` has others."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

PRIVATE_NAMES = (
    "torch.amp.GradScaler._found_inf_per_device",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
)

# Attributes that only instances have, so that a test looks at what they do instead.
PRIVATE_ATTRIBUTES = ("_is_root",)

FSDP = "torch.distributed.fsdp"  # its import takes 0.3 s, and whoever uses it has imported it


def found_infs(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[Any, Tensor]:
    """Return where `unscale_` has noted, by device, whether a gradient was not finite.

    The public interface only tells by skipping the step, and it is too late then to tell others.
    """
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    return found


def is_sharded_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called for a module."""
    return FSDP in sys.modules and isinstance(module, sys.modules[FSDP].FSDPModule)


def reduce_sharded_gradients(module: Any) -> None:
    """Sum the gradients that backwards without synchronisation have left, and keep the shards.

    It does something for the outermost module of those that are called within each other. torch's
    own pipelines do the same; publicly, only a backward reduces what it has added itself.
    """
    state = module._get_fsdp_state()
    if state._is_root:
        state._root_post_backward_final_callback()
