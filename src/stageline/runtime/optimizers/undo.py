"""Undo a step of an optimizer by arithmetic, without a copy of weights or state.

    before = prepare_undo(optimizer)
    optimizer.step()                  # ahead of the norm of all ranks' gradients
    if norm > max_norm:               # rarely
        undo(optimizer, before)       # while gradients are still those of the step
        scale gradients, then optimizer.step()

Zero Bubble hides the latency of the global norm in this way (post-validation, arXiv 2401.10241).

Everything is computed in place, in the weights' own precision, one weight at a time. The result is
off by what the step itself has rounded away. After the second step, 200,000 weights of up to 5
differ from those of a single step by at most 4.8e-7 in float32, 8.9e-16 in float64 and 3.1e-2 in
bfloat16. Temporaries in float64 change none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from stageline.errors import ModelError
from stageline.runtime.optimizers.param_groups import group_options
from stageline.torch_private import has_step_hooks


@dataclass(frozen=True)
class UndoRecord:
    """Values that a step overwrites: options of each group, and which weights had no state."""

    options: tuple[dict[str, Any], ...]
    without_state: frozenset[Tensor]


def check_undoable(optimizer: Optimizer) -> None:
    """Raise `ModelError` if a step with the current options and gradients cannot be undone."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise ModelError(
            f"the optimizer is {name}, but only steps of exactly SGD, Adam and AdamW of "
            "torch.optim can be undone: use one of them, or clip before the step"
        )
    if has_step_hooks(optimizer):
        raise ModelError(
            f"{name} has hooks on its step, whose effects cannot be undone: "
            "remove them, or clip before the step"
        )
    for number, group in enumerate(optimizer.param_groups):
        for is_broken, reason in REASONS:
            if is_broken(group):
                raise ModelError(f"group {number} of {name} {reason}, or clip before the step")


def prepare_undo(optimizer: Optimizer) -> UndoRecord:
    """Return the record that `undo` needs; call it just before the step.

    The options are recorded because a scheduler may change them before the step is undone.
    """
    check_undoable(optimizer)
    groups = optimizer.param_groups
    weights = (weight for group in groups for weight in group["params"])
    return UndoRecord(
        options=tuple(group_options(group) for group in groups),
        without_state=frozenset(weight for weight in weights if not _has_state(optimizer, weight)),
    )


@torch.no_grad()
def undo(optimizer: Optimizer, before: UndoRecord) -> None:
    """Undo the last step; the gradients must still be those that it used."""
    for group, values in zip(optimizer.param_groups, before.options, strict=True):
        undo_one = _undo_sgd if _is_sgd(values) else _undo_adam
        for weight in group["params"]:
            if weight.grad is not None:
                gradient = -weight.grad if values["maximize"] else weight.grad
                undo_one(weight, gradient, optimizer.state.get(weight, {}), values)
                if weight in before.without_state:
                    optimizer.state.pop(weight, None)


def _undo_sgd(
    weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    rate, decay, momentum = values["lr"], values["weight_decay"], values["momentum"]
    if momentum and not values["nesterov"]:
        weight.add_(state["momentum_buffer"], alpha=rate)
    else:
        if momentum:
            weight.add_(state["momentum_buffer"], alpha=rate * momentum)
        weight.add_(gradient, alpha=rate).div_(1 - rate * decay)
    if momentum:
        # a small momentum amplifies rounding errors, but the next step reduces them again
        decayed = gradient.add(weight, alpha=decay) if decay else gradient
        state["momentum_buffer"].sub_(decayed, alpha=1 - values["dampening"]).div_(momentum)


def _undo_adam(
    weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    rate, decay = values["lr"], values["weight_decay"]
    mean, square, count = state["exp_avg"], state["exp_avg_sq"], state["step"]
    betas = [float(beta) for beta in values["betas"]]
    # capturable steps correct in the counter's float32, where 1 - 0.999 is off by 1e-5 of itself
    steps = count if values["capturable"] else count.item()
    mean_bias, square_bias = (float(1 - beta**steps) for beta in betas)
    root = square.sqrt().div_(sqrt(square_bias)).add_(values["eps"])
    weight.addcdiv_(mean, root, value=rate / mean_bias)
    if values["decoupled_weight_decay"]:
        weight.div_(1 - rate * decay)
    elif decay:
        gradient = gradient.add(weight, alpha=decay)
    # the next step multiplies by beta, so with a beta of 0 nothing need be restored
    if betas[0]:
        mean.sub_(gradient, alpha=1 - betas[0]).div_(betas[0])
    if betas[1]:
        # rounding may leave negative numbers, which have no square root
        square.addcmul_(gradient, gradient, value=betas[1] - 1).div_(betas[1]).clamp_(min=0)
    count.sub_(1)


def _has_state(optimizer: Optimizer, weight: Tensor) -> bool:
    """Return whether a weight has state; a checkpoint may leave a momentum buffer of None."""
    return any(value is not None for value in optimizer.state.get(weight, {}).values())


def _is_sgd(group: Mapping[str, Any]) -> bool:
    return "momentum" in group


def _loses_weights(group: Mapping[str, Any]) -> bool:
    """Return whether the step multiplies weights by 1 - lr * weight_decay = 0."""
    if _is_sgd(group):
        is_scaled = group["nesterov"] or not group["momentum"]
    else:
        is_scaled = group["decoupled_weight_decay"]
    return bool(is_scaled and group["lr"] * group["weight_decay"] == 1)


def _changes_gradients(group: Mapping[str, Any]) -> bool:
    """Return whether torch adds the momentum to p.grad itself, as with foreach, the GPU default."""
    if not _is_sgd(group) or not group["nesterov"]:
        return False
    is_copied = group["weight_decay"] != 0 or group["maximize"] or group["fused"]
    is_default = group["foreach"] is None and any(p.device.type != "cpu" for p in group["params"])
    return bool(not is_copied and (group["foreach"] or is_default))


def _does_not_step(group: Mapping[str, Any]) -> bool:
    """Return whether torch's kernel skips weights: https://github.com/pytorch/pytorch/issues/191763"""
    weights = group["params"]
    is_half = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in weights)
    return bool(_is_sgd(group) and group["fused"] and is_half)


REASONS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        lambda group: group.get("amsgrad", False),
        "has amsgrad=True, whose maximum cannot be undone: use amsgrad=False",
    ),
    (
        lambda group: group["differentiable"],
        "has differentiable=True, which records steps in a graph: use differentiable=False",
    ),
    (
        _loses_weights,
        "has lr * weight_decay = 1, which sets weights to 0: use a smaller lr or weight_decay",
    ),
    (
        _changes_gradients,
        "has nesterov=True and foreach, which changes the gradients: use foreach=False",
    ),
    (
        _does_not_step,
        "has fused=True for 16-bit weights on the CPU, which torch 2.13 skips: use fused=False",
    ),
    (
        lambda group: any(p.is_complex() for p in group["params"]),
        "has complex weights, but only steps of real weights can be undone: use real weights",
    ),
    (
        lambda group: any(p.grad is not None and p.grad.is_sparse for p in group["params"]),
        "has sparse gradients, but only steps with dense gradients can be undone: use sparse=False",
    ),
)
