"""The backward in halves: gradients of inputs now, of weights later, with autograd's own bits.

While a stage runs forward, functions that use parameters are caught on their way. Each runs in a
small graph of its own, between copies of its inputs and its output:

    ── x ──►┊ x' ─► linear(x', weight, bias) ─► y' ┊── y ──►      the stage's graph goes around it

When the gradient of y arrives (I), autograd takes it from y' to x' and no further, and the gradient
waits. Later (W) autograd takes it from y' to the weights. What is held in between is what the small
graphs hold. Functions that are not caught are no harm: their weights get their gradients during I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.overrides import TorchFunctionMode

from stageline.runtime import engine

# Not F.group_norm: torch 2.13 crashes in its backward where memory is channels_last and only the
# gradients of the weights are wanted.
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
    outputs: list[GradientEdge]  # of its graph, which does not need the data
    linear: tuple[Any, ...]  # the arguments, if it is a linear
    gradients: tuple[Tensor | None, ...] = ()


class CatchWeights(TorchFunctionMode):
    """In force while a stage runs forward; `calls` fills up in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Caught] = []
        self.anchor = torch.empty(0, requires_grad=True)  # so that a gradient always arrives

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in CAUGHT and torch.is_grad_enabled():
            needy = {id(t): t for t in _tensors((*args, *kwargs.values())) if t.requires_grad}
            weights = [tensor for tensor in needy.values() if isinstance(tensor, nn.Parameter)]
            if weights:
                return self._catch(func, args, kwargs, needy, weights)
        return func(*args, **kwargs)

    def _catch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        needy: dict[int, Tensor],
        weights: list[nn.Parameter],
    ) -> Any:
        # what is given several times, as query and as key say, is one input with one gradient
        inputs = [tensor for tensor in needy.values() if not isinstance(tensor, nn.Parameter)]
        copies = {id(tensor): tensor.detach().requires_grad_() for tensor in inputs}
        args = tuple(_swapped(item, copies) for item in args)
        kwargs = {name: _swapped(item, copies) for name, item in kwargs.items()}
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        outputs = [get_gradient_edge(item) for item in results if _needs_gradient(item)]
        given = args if func is F.linear and not kwargs else ()
        call = Caught(list(copies.values()), weights, outputs, given)
        self.calls.append(call)
        needed = [item for item in results if _needs_gradient(item)]
        outside = iter(_Around.apply(call, needed, self.anchor, *inputs))  # type: ignore[no-untyped-call]
        around = tuple(next(outside) if _needs_gradient(item) else item for item in results)
        return around if isinstance(result, tuple) else around[0]


class _Around(torch.autograd.Function):
    """What the stage's graph sees in place of a call."""

    @staticmethod
    def forward(ctx: Any, call: Caught, outputs: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Caught = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a layer takes gradients of gradients, but a backward in halves has none: "
                "use a schedule without I and W"
            )
        call.gradients = gradients
        arrived = _arrived(call)
        if not call.leaves or not arrived:
            return None, None, None, *(None for _ in call.leaves)
        outputs, found = zip(*arrived, strict=True)
        return None, None, None, *engine.gradients(call.leaves, outputs, found)


def add_weight_gradients(calls: Iterable[Caught], *, fused: bool = False) -> None:
    """Take gradients from the calls to the weights: `.grad` changes as autograd changes it.

    One backward for all calls, so that the uses of a weight are added to each other first, the last
    one first. `fused` adds those of matrix products inside of the product.
    """
    ordinary = [call for call in calls if not (fused and _add_inside(call))]
    arrived = [pair for call in ordinary for pair in _arrived(call)]
    if arrived:
        outputs, gradients = zip(*arrived, strict=True)
        weights = {id(weight): weight for call in ordinary for weight in call.weights}
        engine.backward_to(list(weights.values()), outputs, gradients)


def _add_inside(call: Caught) -> bool:
    """`grad += gradientᵀ · x` for a linear, without a matrix in between; False if it is not that.

    About a third faster than a product and a sum, for 128 rows.
    """
    if not call.linear or not _arrived(call):
        return False
    x, weight, *bias = call.linear
    gradient = _arrived(call)[0][1]
    others = (x, gradient, weight.grad) if weight.grad is not None else (x, gradient)
    if not _is_plain(weight) or any(tensor.dtype != weight.dtype for tensor in others):
        return False  # autocast: the product is of another type than the sum
    rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.detach().reshape(-1, x.shape[-1])
    if weight.requires_grad:
        if weight.grad is None:
            weight.grad = rows.t().mm(columns)
        else:
            weight.grad.addmm_(rows.t(), columns)
    if bias and bias[0] is not None and bias[0].requires_grad:
        total = rows.sum(0)
        bias[0].grad = total if bias[0].grad is None else bias[0].grad.add_(total)
    return True


def _is_plain(weight: Any) -> bool:
    """A parameter without hooks that want to see its gradient."""
    hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
    return isinstance(weight, nn.Parameter) and not hooks


def _arrived(call: Caught) -> list[tuple[GradientEdge, Tensor]]:
    pairs = zip(call.outputs, call.gradients, strict=False)
    return [(output, gradient) for output, gradient in pairs if gradient is not None]


def _tensors(items: Iterable[Any]) -> Iterable[Tensor]:
    """Of arguments; `einsum` may be given its operands in a list."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _swapped(item: Any, copies: Mapping[int, Tensor]) -> Any:
    if isinstance(item, list | tuple) and any(True for _ in _tensors(item)):
        return [_swapped(part, copies) for part in item]
    return copies.get(id(item), item)


def _needs_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad
