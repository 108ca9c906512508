"""The output of a filled pipeline, as part of the caller's own graph: its backward drains it.

Draining adds to the `.grad` of weights, micro-batch by micro-batch, as a plain loop does. That is
what `backward()` asks for. Who asks otherwise, by `torch.autograd.grad` or `backward(inputs=…)`,
gets the gradients of the weights that were asked for, and the others keep what they had: the
weights are inputs of the function that connects the graphs, and autograd's engine says which of
them it wants, and whether in `.grad`.
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

Drain = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]

# Whether a node of the graph will run; there is no public way to ask.
_WILL_EXECUTE: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)  # noqa: SLF001


class Asked(Enum):
    """What is to become of a weight's gradient."""

    ADDED = "added to .grad"
    RETURNED = "returned to who asked"
    NOT = "not asked for"


def connected(
    outputs: Sequence[Tensor],
    have_gradients: Sequence[bool],
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
    drain: Drain,
) -> tuple[Tensor, ...]:
    """Return outputs whose gradients go into `drain`, which gives back those of the inputs."""
    # where gradients are added to .grad this way brings None, and hooks would be called with it
    reached = tuple(weight for weight in weights if not _has_hooks(weight))
    anchor = torch.empty(0, requires_grad=True)  # also: there may be neither inputs nor weights
    about = tuple(outputs), have_gradients, tuple(weights), reached, drain
    return _Connected.apply(about, anchor, *inputs, *reached)  # type: ignore[no-any-return, no-untyped-call]


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, about: tuple[Any, ...], *_: Tensor) -> tuple[Tensor, ...]:
        outputs, have_gradients, ctx.weights, ctx.reached, ctx.drain = about
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, have_gradients, strict=True)
        ctx.mark_non_differentiable(*(output for output, has_one in pairs if not has_one))
        connected: tuple[Tensor, ...] = outputs
        return connected

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "gradients of gradients were asked for through a pipeline's output, but it has "
                "none: take them of a plain model, or leave create_graph=True away"
            )
        # what nobody can ask for by name: it is wanted if all of the graph is
        is_all = _WILL_EXECUTE is None or _WILL_EXECUTE(ctx.next_functions[0][0])
        asked = {weight: Asked.ADDED if is_all else _asked(weight) for weight in ctx.weights}
        aside = [weight for weight, what in asked.items() if what is not Asked.ADDED]
        with _set_aside(aside):
            of_inputs = ctx.drain(gradients)
            found = [w.grad if asked[w] is Asked.RETURNED else None for w in ctx.reached]
        return None, None, *of_inputs, *found


def _asked(weight: nn.Parameter) -> Asked:
    """Return what the engine that is at work wants of a weight."""
    assert _WILL_EXECUTE is not None  # otherwise nobody knows
    try:
        is_wanted = _WILL_EXECUTE(get_gradient_edge(weight).node)
    except RuntimeError:  # its answer for a leaf whose gradient autograd.grad returns
        return Asked.RETURNED
    return Asked.ADDED if is_wanted else Asked.NOT


@contextmanager
def _set_aside(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within it these weights have no gradient, after it what they had."""
    if any(map(_has_hooks, weights)):
        raise ModelError(
            "gradients of some tensors only were asked for through a pipeline's output, and "
            "weights that are not among them have hooks, which would be called all the same: "
            "remove the hooks, or call backward() without inputs="
        )
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient


def _has_hooks(weight: nn.Parameter) -> bool:
    """Whether something is called when its gradient is there, or was added."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)  # noqa: SLF001  nobody else knows
