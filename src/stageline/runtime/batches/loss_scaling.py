"""Scale losses for float16, with torch's own `GradScaler`.

    step(…, scaler=scaler)    the loss's gradient × scale ─► all gradients of all stages × scale
    unscale_                  gradients / scale; a process that found inf or NaN tells all others
    scaler.step, .update      all processes step, or all skip and halve the scale

Without the second line a process would see its own stages only, and scales would differ from then
on. The loss that a step returns is not scaled.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.optim import Optimizer

from stageline.arguments import check_type
from stageline.errors import ModelError
from stageline.runtime.backends.backend import Group
from stageline.runtime.engine.session import Session
from stageline.torch_private_training import found_infs

HINT = "make one for each process, torch.amp.GradScaler('cuda'), and give it to step and unscale_"


def scale_of_step(session: Session, scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """Return the factor that scales the gradients of a step, or None without a scaler."""
    if scaler is None:
        return None
    check_type("scaler", scaler, torch.amp.GradScaler, HINT, ModelError)
    if session.optimizers is not None:
        raise ModelError(
            "step was given a scaler, but the pipeline has an optimizer for each stage, which "
            "steps before the gradients of all stages are known: omit optimizer_fn and step "
            "an optimizer of your own by scaler.step(optimizer), or use bfloat16 without a scaler"
        )
    if not scaler.is_enabled():
        return None
    _warn_of_own_unscaling(session)
    session.has_scaled_gradients = True
    weight = next(session.assembly.layout.parameters(), None)
    device = None if weight is None or weight.is_meta else weight.device
    return scaler.scale(torch.ones((), device=device))  # the first time this makes the scale


def unscale(session: Session, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Divide gradients by the scale; if one of any process is not finite, let all of them know."""
    check_type("scaler", scaler, torch.amp.GradScaler, HINT, ModelError)
    if not scaler.is_enabled():
        return
    _check_mixture(optimizer)
    scaler.unscale_(optimizer)
    session.has_scaled_gradients = False
    collectives = session.assembly.collectives
    if collectives.size(Group.EVERYONE) == 1:
        return
    own = found_infs(scaler, optimizer)
    largest = torch.zeros(1)
    for each in own.values():
        largest = torch.maximum(largest, each.cpu())
    arrive = collectives.all_reduce(largest, "whether gradients are finite", Group.EVERYONE)
    everywhere = arrive().clamp(max=1.0)[0]  # 1, as torch's kernels expect, if it was found twice
    for found in own.values():
        found.copy_(everywhere)
    if not own:  # no gradients here, but this process's scale has to change as all others do
        own[everywhere.device] = everywhere


def _check_mixture(optimizer: Optimizer) -> None:
    """Raise ModelError if the optimizer has whole weights beside some in shards: torch would."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if len({hasattr(weight, "to_local") for weight in weights}) > 1:
        raise ModelError(
            "the optimizer has weights in shards and whole ones, but a GradScaler cannot unscale "
            "them together: make an optimizer for each sort, and call unscale_ and scaler.step "
            "with both"
        )


def _warn_of_own_unscaling(session: Session) -> None:
    """Warn if the gradients of the last scaled step are gone, and `unscale` was not called."""
    is_alone = session.assembly.collectives.size(Group.EVERYONE) == 1
    if is_alone or not session.has_scaled_gradients:
        return
    if all(weight.grad is None for weight in session.assembly.layout.parameters()):
        warnings.warn(
            "the scaled gradients of the last step are gone, but pipe.unscale_(scaler, optimizer) "
            "was not called: each process looks at its own gradients only then, and some may step "
            "while others skip: call it before scaler.step(optimizer)",
            stacklevel=4,
        )
