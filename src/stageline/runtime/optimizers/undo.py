"""One step of an optimizer, taken back by arithmetic, without a copy of weights or state.

    before = remember(optimizer)
    optimizer.step()                  # ahead of the norm of all ranks' gradients
    if norm > max_norm:               # rarely
        undo(optimizer, before)       # while gradients are still those of the step
        scale gradients, then optimizer.step()

So Zero Bubble hides the norm's journey around the ranks (post-validation, arXiv 2401.10241).

All of it happens in place, in the weights' own precision, one weight at a time. What comes back is
off by what the step itself rounded away. Once the second step is made, 200,000 weights of up to 5
differ from those of one step by 4.8e-7 at most in float32, 8.9e-16 in float64 and 3.1e-2 in
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
from stageline.runtime.optimizers.param_groups import options
from stageline.torch_private import has_step_hooks


@dataclass(frozen=True)
class Before:
    """What a step does not leave behind: by group its options, and the weights without a state."""

    options: tuple[dict[str, Any], ...]
    fresh: frozenset[Tensor]


def check_undoable(optimizer: Optimizer) -> None:
    """Raises ModelError if a step with the present options and gradients could not be undone."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise ModelError(
            f"the optimizer is {name}, but only steps of exactly SGD, Adam and AdamW of "
            "torch.optim can be taken back: use one of them, or clip before the step"
        )
    if has_step_hooks(optimizer):
        raise ModelError(
            f"{name} has hooks on its step, and what they do cannot be taken back: "
            "remove them, or clip before the step"
        )
    for number, group in enumerate(optimizer.param_groups):
        for is_broken, reason in REASONS:
            if is_broken(group):
                raise ModelError(f"group {number} of {name} {reason}, or clip before the step")


def remember(optimizer: Optimizer) -> Before:
    """Just before a step; a scheduler may change the options before the step is taken back."""
    check_undoable(optimizer)
    groups = optimizer.param_groups
    weights = (weight for group in groups for weight in group["params"])
    return Before(
        options=tuple(options(group) for group in groups),
        fresh=frozenset(weight for weight in weights if not _has_state(optimizer, weight)),
    )


@torch.no_grad()
def undo(optimizer: Optimizer, before: Before) -> None:
    """Take back the last step: gradients are those that it used."""
    for group, values in zip(optimizer.param_groups, before.options, strict=True):
        undo_one = _undo_sgd if _is_sgd(values) else _undo_adam
        for weight in group["params"]:
            if weight.grad is not None:
                gradient = -weight.grad if values["maximize"] else weight.grad
                undo_one(weight, gradient, optimizer.state.get(weight, {}), values)
                if weight in before.fresh:
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
        # a small momentum makes errors large, but the next step makes them small again
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
    # the next step multiplies by beta: what it multiplies by zero need not come back
    if betas[0]:
        mean.sub_(gradient, alpha=1 - betas[0]).div_(betas[0])
    if betas[1]:
        # rounding may leave less than nothing, of which there is no root
        square.addcmul_(gradient, gradient, value=betas[1] - 1).div_(betas[1]).clamp_(min=0)
    count.sub_(1)


def _has_state(optimizer: Optimizer, weight: Tensor) -> bool:
    """Checkpoints may bring a momentum of None, which is none."""
    return any(value is not None for value in optimizer.state.get(weight, {}).values())


def _is_sgd(group: Mapping[str, Any]) -> bool:
    return "momentum" in group


def _loses_weights(group: Mapping[str, Any]) -> bool:
    """Weights are multiplied by 1 - lr * weight_decay, unless the decay goes into a moment."""
    if _is_sgd(group):
        is_scaled = group["nesterov"] or not group["momentum"]
    else:
        is_scaled = group["decoupled_weight_decay"]
    return bool(is_scaled and group["lr"] * group["weight_decay"] == 1)


def _changes_gradients(group: Mapping[str, Any]) -> bool:
    """With foreach, which is the default off the CPU, torch adds the momentum to p.grad itself."""
    if not _is_sgd(group) or not group["nesterov"]:
        return False
    is_copied = group["weight_decay"] != 0 or group["maximize"] or group["fused"]
    is_default = group["foreach"] is None and any(p.device.type != "cpu" for p in group["params"])
    return bool(not is_copied and (group["foreach"] or is_default))


def _does_not_step(group: Mapping[str, Any]) -> bool:
    """Its kernel skips whole vectors of them: https://github.com/pytorch/pytorch/issues/191763"""
    weights = group["params"]
    is_half = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in weights)
    return bool(_is_sgd(group) and group["fused"] and is_half)


REASONS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        lambda group: group.get("amsgrad", False),
        "has amsgrad=True, and what a maximum replaced cannot come back: use amsgrad=False",
    ),
    (
        lambda group: group["differentiable"],
        "has differentiable=True, which keeps steps in a graph: use differentiable=False",
    ),
    (
        _loses_weights,
        "has lr * weight_decay = 1, which forgets what weights were: use less of either",
    ),
    (
        _changes_gradients,
        "has nesterov=True and foreach, which changes gradients as it steps: use foreach=False",
    ),
    (
        _does_not_step,
        "has fused=True for 16 bits on the CPU, which torch 2.13 does not step: use fused=False",
    ),
    (
        lambda group: any(p.is_complex() for p in group["params"]),
        "has complex weights, but only steps of real ones can be taken back: use real ones",
    ),
    (
        lambda group: any(p.grad is not None and p.grad.is_sparse for p in group["params"]),
        "has sparse gradients, but only dense ones can be taken back: use sparse=False",
    ),
)
