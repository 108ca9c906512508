"""The backward in halves: gradients of inputs now, of weights later, with autograd's own bits.

While a stage runs forward, functions that use parameters are caught on their way. Each runs in a
small graph of its own, between copies of its inputs and its output:

    ── x ──►┊ x' ─► linear(x', weight, bias) ─► y' ┊── y ──►      the stage's graph goes around it

When the gradient of y arrives (I), autograd takes it from y' to x' and no further, and the gradient
waits. Later (W) autograd takes it from y' to the weights. What is held in between is what the small
graphs hold. Functions that are not caught are no harm: their weights get their gradients during I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

CAUGHT: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear,
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.embedding,
        F.embedding_bag,
        F.layer_norm,
        F.group_norm,
        F.rms_norm,
        F.batch_norm,
        F.instance_norm,
        F.multi_head_attention_forward,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.einsum,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
    }
)


@dataclass
class Caught:
    """One call: its small graph, and the gradient of its output once that has arrived."""

    leaves: list[Tensor]  # copies of the inputs that need a gradient
    weights: list[nn.Parameter]
    outputs: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)


class CatchWeights(TorchFunctionMode):
    """In force while a stage runs forward; `calls` fills up in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Caught] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CAUGHT or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        items, form = pytree.tree_flatten((args, kwargs))
        weights = {id(i): i for i in items if isinstance(i, nn.Parameter) and i.requires_grad}
        if not weights:
            return func(*args, **kwargs)
        return self._catch(func, items, form, list(weights.values()))

    def _catch(
        self,
        func: Callable[..., Any],
        items: list[Any],
        form: pytree.TreeSpec,
        weights: list[nn.Parameter],
    ) -> Any:
        # what is given several times, as query and as key say, is one input with one gradient
        needy = {id(i): i for i in items if _needs_gradient(i) and not isinstance(i, nn.Parameter)}
        inputs = list(needy.values())
        copies = {id(tensor): tensor.detach().requires_grad_() for tensor in inputs}
        args, kwargs = pytree.tree_unflatten([copies.get(id(i), i) for i in items], form)
        results, result_form = pytree.tree_flatten(func(*args, **kwargs))
        outputs = [result for result in results if _needs_gradient(result)]
        call = Caught([copies[id(tensor)] for tensor in inputs], weights, outputs)
        self.calls.append(call)
        anchor = torch.empty(0, requires_grad=True)  # a gradient comes even if no input needs one
        outside = iter(_Around.apply(call, anchor, *inputs))  # type: ignore[no-untyped-call]
        around = [next(outside) if _needs_gradient(result) else result for result in results]
        return pytree.tree_unflatten(around, result_form)


class _Around(torch.autograd.Function):
    """What the stage's graph sees in place of a call."""

    @staticmethod
    def forward(ctx: Any, call: Caught, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in call.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Caught = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a layer takes gradients of gradients, but a backward in halves has none: "
                "use a schedule without I and W"
            )
        call.gradients = list(gradients)
        return None, None, *_gradients(call, call.leaves, keep=True)


def add_weight_gradients(calls: Iterable[Caught]) -> None:
    """Add to `.grad` as autograd does: the uses of a weight first to each other, last one first."""
    sums: dict[nn.Parameter, Tensor] = {}
    for call in reversed(list(calls)):
        for weight, gradient in zip(call.weights, _gradients(call, call.weights), strict=True):
            if gradient is not None:
                sums[weight] = sums[weight] + gradient if weight in sums else gradient
    for weight, total in sums.items():
        if weight.grad is not None:
            weight.grad.add_(total)
        elif total.is_sparse:
            weight.grad = total.clone()
        else:  # it may be shared between weights, or expanded: autograd copies it then as well
            weight.grad = torch.empty_like(weight).copy_(total)


def _gradients(call: Caught, wanted: list[Any], *, keep: bool = False) -> tuple[Tensor | None, ...]:
    arrived = [(o, g) for o, g in zip(call.outputs, call.gradients, strict=False) if g is not None]
    if not wanted or not arrived:
        return (None,) * len(wanted)
    outputs, gradients = zip(*arrived, strict=True)
    return torch.autograd.grad(outputs, wanted, gradients, retain_graph=keep, allow_unused=True)


def _needs_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad
