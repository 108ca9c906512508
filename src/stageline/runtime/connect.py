"""The output of a filled pipeline, as part of the caller's own graph: its backward drains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.errors import ModelError

Drain = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


def connected(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], drain: Drain
) -> tuple[Tensor, ...]:
    """Outputs whose gradients go into `drain`, which gives back those of the inputs."""
    anchor = torch.empty(0, requires_grad=True)  # weights need a gradient even if no input does
    return _Connected.apply(tuple(outputs), drain, anchor, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: tuple[Tensor, ...], drain: Drain, *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.drain = drain
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "gradients of gradients were asked for through a pipeline's output, but it has "
                "none: take them of a plain model, or leave create_graph=True away"
            )
        return None, None, None, *ctx.drain(gradients)
