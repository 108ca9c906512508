"""Private names of torch for loss scaling, shards and compiling; `torch_private.py` has others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

PRIVATE_NAMES = (
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch.amp.GradScaler._found_inf_per_device",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
)

# Attributes that only instances have, so that a test looks at what they do instead.
PRIVATE_ATTRIBUTES = ("_is_root", "_fsdp_param_groups", "_orig_param_uid", "_fsdp_orig_uid")

FSDP = "torch.distributed.fsdp"  # its import takes 0.3 s, and whoever uses it has imported it


F = TypeVar("F", bound=Callable[..., Any])


def skipped_by_compiler(function: F) -> F:
    """Let torch.compile run a function, and all that it calls, as they are.

    Torch's own decorator imports the compiler, which takes 5 s, and takes 10 µs a call. Without
    these private names the compiler traces the function too, which is slow but not wrong.
    """
    with suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        code = cast("Any", function).__code__
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def found_infs(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[Any, Tensor]:
    """Return where `unscale_` has noted, by device, whether a gradient was not finite.

    The public interface only tells by skipping the step, and it is too late then to tell others.
    """
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    return found


def is_sharded_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called for a module."""
    return FSDP in sys.modules and isinstance(module, sys.modules[FSDP].FSDPModule)


def is_sharding_state(module: Any, value: object) -> bool:
    """Return whether an attribute of a module is what `fully_shard` keeps there."""
    if not is_sharded_module(module) or not isinstance(value, dict):
        return False
    return module._get_fsdp_state() in value.values()


def sharded_origins(module: nn.Module) -> set[int]:
    """Return what tells which weights, before `fully_shard`, those of a module come from.

    A weight that two modules share becomes two weights if they are sharded one by one. It has a
    number then, also in a module that was not sharded.
    """
    found: set[Any] = {getattr(p, "_fsdp_orig_uid", None) for p in module.parameters()}
    for part in module.modules():
        if is_sharded_module(part):
            groups = part._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
            found |= {weight._orig_param_uid for group in groups for weight in group.fsdp_params}
    return found - {None}


def reduce_sharded_gradients(module: Any) -> None:
    """Sum the gradients that backwards without synchronisation have left, and keep the shards.

    It does something for the outermost module of those that are called within each other. torch's
    own pipelines do the same; publicly, only a backward reduces what it has added itself.
    """
    state = module._get_fsdp_state()
    if state._is_root:
        state._root_post_backward_final_callback()
