"""The type in which the gradients of a weight are added: its own, or a wider one.

    bf16 weight    micro-batch 0: bf16 gradient ─► float32 ─┐
                   micro-batch 1: bf16 gradient ─► float32 ─┴─► += into a float32 `.grad`

Each gradient is computed in the weight's type, because autograd does it so. What a bf16 sum of many
micro-batches loses is the small gradient that is added to a large sum: a bf16 number has 8 bits.

torch converts the gradients: a weight has a `grad_dtype`, which is the type of its `.grad`. So a
plain loop over weights with the same `grad_dtype` has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stageline.errors import ModelError

EXACT, FUSED = "exact", "fused"
FLOATING_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of norms, losses


def accumulation_type(accumulate: object) -> torch.dtype | None:
    """Return the type in which `accumulate` asks to add; None for that of each weight.

    >>> accumulation_type("float32"), accumulation_type("exact")
    (torch.float32, None)
    """
    if accumulate in (EXACT, FUSED):
        return None
    found = getattr(torch, accumulate, None) if isinstance(accumulate, str) else accumulate
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(
            f"accumulate is {accumulate!r}, but takes {EXACT!r} or {FUSED!r}, or the floating "
            "type in which gradients are added, such as torch.float32"
        )
    return found


def accumulate_in(weights: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let the gradients of weights that have fewer bits be added in this type.

    Gradients that are there already are converted.
    """
    for weight in weights:
        if has_fewer_bits(weight, dtype):
            gradient, weight.grad = weight.grad, None
            weight.grad_dtype = dtype
            weight.grad = None if gradient is None else gradient.to(dtype)


def gradient_type(weight: Tensor) -> torch.dtype:
    """Return the type of a weight's `.grad`."""
    return weight.dtype if weight.grad_dtype is None else weight.grad_dtype


def with_another_gradient_type(weights: Iterable[Tensor]) -> Tensor | None:
    """Return the first weight whose gradient has another type than the weight itself."""
    return next((weight for weight in weights if gradient_type(weight) != weight.dtype), None)


def adopt_gradient_type(alias: Tensor, weight: Tensor) -> None:
    """Let the gradients of an alias have the type of its weight's."""
    if alias.grad_dtype != weight.grad_dtype:
        alias.grad_dtype = weight.grad_dtype


def has_fewer_bits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether gradients of a weight can be added in this type instead of its own."""
    return weight.is_floating_point() and weight.dtype.itemsize < dtype.itemsize
