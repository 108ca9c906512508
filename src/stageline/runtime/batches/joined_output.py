"""Connect the output of `pipe(inputs)` to the caller's graph: its backward drains the pipeline.

Draining adds to the `.grad` of weights, micro-batch by micro-batch, as a plain loop does. That is
what `backward()` asks for. `torch.autograd.grad` and `backward(inputs=…)` ask for the gradients of
some tensors only; all other weights then keep the gradient they had. For this the weights are
inputs of the function that connects the graphs, and autograd's engine tells which of them it needs,
and whether in `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from stageline.errors import ModelError
from stageline.torch_private import has_gradient_hooks, will_execute

Drain = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class GradientRequest(Enum):
    """The use that the caller's backward makes of a weight's gradient."""

    ACCUMULATE = "added to .grad"
    RETURN = "returned by autograd.grad"
    NONE = "not requested"


def connect_outputs(
    outputs: Sequence[Tensor],
    have_gradients: Sequence[bool],
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
    drain: Drain,
) -> tuple[Tensor, ...]:
    """Return outputs whose gradients are passed to `drain`, which returns those of the inputs."""
    # gradients that are added to .grad come back as None here, and hooks would be called with it
    reached = tuple(weight for weight in weights if not has_gradient_hooks(weight))
    anchor = torch.empty(0, requires_grad=True)  # there may be neither inputs nor weights
    settings = tuple(outputs), have_gradients, tuple(weights), reached, drain
    return _Connected.apply(settings, anchor, *inputs, *reached)  # type: ignore[no-any-return, no-untyped-call]


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], *_: Tensor) -> tuple[Tensor, ...]:
        outputs, have_gradients, ctx.weights, ctx.reached, ctx.drain = settings
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, have_gradients, strict=True)
        ctx.mark_non_differentiable(*(output for output, has_one in pairs if not has_one))
        connected: tuple[Tensor, ...] = outputs
        return connected

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "gradients of gradients were requested through a pipeline's output, which has "
                "none: use the plain model, or omit create_graph=True"
            )
        # the anchor cannot be requested by name: it is needed only if the whole graph is
        is_all = will_execute(ctx.next_functions[0][0]) is not False
        everything = dict.fromkeys(ctx.weights, GradientRequest.ACCUMULATE)
        requests = everything if is_all else {w: _request(w) for w in ctx.weights}
        others = [w for w, request in requests.items() if request is not GradientRequest.ACCUMULATE]
        with _without_gradients(others):
            of_inputs = ctx.drain(gradients)
            returned = {w for w, request in requests.items() if request is GradientRequest.RETURN}
            found = [w.grad if w in returned else None for w in ctx.reached]
        return None, None, *of_inputs, *found


def _request(weight: nn.Parameter) -> GradientRequest:
    """Return what the backward that runs now does with a weight's gradient."""
    try:
        is_needed = will_execute(get_gradient_edge(weight).node)
    except RuntimeError:  # the engine's answer for a leaf whose gradient autograd.grad returns
        return GradientRequest.RETURN
    return GradientRequest.ACCUMULATE if is_needed else GradientRequest.NONE


@contextmanager
def _without_gradients(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set `.grad` of these weights to None, and restore it on leaving."""
    if any(map(has_gradient_hooks, weights)):
        raise ModelError(
            "gradients of some tensors only were requested through a pipeline's output, but other "
            "weights have hooks, which would be called as well: remove the hooks, or call "
            "backward() without inputs="
        )
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient
