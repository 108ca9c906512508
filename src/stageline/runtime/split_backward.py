"""The backward in halves: gradients of inputs now, of weights later, with autograd's own bits.

While a stage runs forward, functions that use parameters are caught on their way. Each runs in a
small graph of its own, between copies of its inputs and its output:

    ── x ──►┊ x' ─► linear(x', weight, bias) ─► y' ┊── y ──►      the stage's graph goes around it

When the gradient of y arrives (I), autograd takes it from y' to x' and no further, and the gradient
waits. Later (W) autograd takes it from y' to the weights. What is held in between is what the small
graphs hold. Functions that are not caught are no harm: their weights get their gradients during I.

A weight gets all of its gradient in one half, or a sum would be rounded in another order than
autograd's: a layer that uses a weight in both ways is not caught at all, nor is one whose graph is
differentiated by something else than the stage's own backward (`inner.py`).
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
from stageline.runtime.inner import DIFFERENTIATES, Inner, RepeatForward, is_transformed, too_late

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
class Forward:
    """The forward that calls are caught in. It does not hold the calls, which hold it."""

    inner: Inner
    is_over: bool = False


@dataclass
class Caught:
    """One call: its small graph, and the gradient of its output once that has arrived."""

    forward: Forward
    leaves: list[Tensor]  # copies of the inputs that need a gradient
    weights: list[nn.Parameter]
    outputs: list[GradientEdge]  # of its graph, which does not need the data
    linear: tuple[Any, ...]  # the arguments, if it is a linear
    gradients: tuple[Tensor | None, ...] = ()


class CatchWeights(TorchFunctionMode):
    """In force while a stage runs forward; `calls` fills up in the order of the calls.

    If it `watches`, nothing is caught, but it is noted what could not have been. State: the layer
    that runs, the calls, and how weights were used.
    """

    def __init__(self, inner: Inner | None = None, *, watches: bool = False) -> None:
        super().__init__()
        self.inner, self.watches = inner or Inner(), watches
        self.forward = Forward(self.inner)
        self.layer = 0  # its number
        self.calls: list[Caught] = []
        self.caught: dict[int, tuple[Tensor, int]] = {}  # weights by id, with their layer
        self.direct: dict[int, Tensor] = {}  # weights by id, that functions use uncaught
        self.anchor = torch.empty(0, requires_grad=True)  # so that a gradient always arrives

    def __exit__(self, *error: object) -> None:
        self.forward.is_over = True
        super().__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values()) if kwargs else args
        if func in DIFFERENTIATES:
            self.differentiate()
        if self.watches and is_transformed(given):
            self.inner.note()
        weights = _weights(given)
        if not weights:
            return func(*args, **kwargs)
        if func in CAUGHT and torch.is_grad_enabled() and not self._is_direct(weights, given):
            if not self.watches:
                return self._catch(func, args, kwargs, weights)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if _is_use(result):
            self._use_directly(weights)
        return result

    def differentiate(self) -> None:
        """Something inside the forward takes gradients, maybe through what is caught."""
        self.inner.note()
        if self.calls:
            raise RepeatForward

    def _is_direct(self, weights: list[nn.Parameter], given: tuple[Any, ...]) -> bool:
        """Whether a call must not be caught; if it may be, its weights count as caught."""
        if self.inner.is_direct(self.layer):
            return True
        if is_transformed(given):
            self.inner.note()
            if self.calls:
                raise RepeatForward
            return True
        for weight in weights:
            self.caught.setdefault(id(weight), (weight, self.layer))
            self._check(weight)
        return False

    def _use_directly(self, weights: list[nn.Parameter]) -> None:
        for weight in weights:
            self.direct.setdefault(id(weight), weight)
            self._check(weight)

    def _check(self, weight: nn.Parameter) -> None:
        """A weight that is used in both ways is used directly by its layer from now on."""
        if id(weight) in self.caught and id(weight) in self.direct:
            _, layer = self.caught[id(weight)]
            self.inner.direct |= {layer, self.layer}
            if not self.watches:
                raise RepeatForward

    def _catch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: list[nn.Parameter],
    ) -> Any:
        needy = {id(t): t for t in _tensors((*args, *kwargs.values())) if t.requires_grad}
        # what is given several times, as query and as key say, is one input with one gradient
        inputs = [tensor for tensor in needy.values() if not isinstance(tensor, nn.Parameter)]
        copies = {id(tensor): tensor.detach().requires_grad_() for tensor in inputs}
        args = tuple(_swapped(item, copies) for item in args)
        kwargs = {name: _swapped(item, copies) for name, item in kwargs.items()}
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        outputs = [get_gradient_edge(item) for item in results if _needs_gradient(item)]
        given = args if func is F.linear and not kwargs else ()
        call = Caught(self.forward, list(copies.values()), weights, outputs, given)
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
        if torch.is_grad_enabled() or not call.forward.is_over:
            # not the stage's own backward; it came here on a way that no function of torch tells
            call.forward.inner.note()
            raise too_late() if call.forward.is_over else RepeatForward()
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
    if not all(_is_plain(item) for item in (weight, *bias) if item is not None):
        return False
    if any(tensor.dtype != weight.dtype for tensor in others):
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


def _weights(items: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters among arguments that need a gradient, each once."""
    found: dict[int, nn.Parameter] = {}
    for item in items:
        # a plain tensor is the usual case; asking whether it is a parameter costs a microsecond
        if type(item) is Tensor:
            continue
        if isinstance(item, nn.Parameter):
            if item.requires_grad:
                found[id(item)] = item
        elif isinstance(item, list | tuple):
            found |= {id(weight): weight for weight in _weights(item)}
    return list(found.values())


def _is_use(result: Any) -> bool:
    """Whether a gradient may come back from this to the weights that went in.

    Without a graph it may as well: a function that records one of its own later, as a checkpoint
    does in its backward, runs without.
    """
    if isinstance(result, list | tuple):
        return any(map(_is_use, result))
    return isinstance(result, Tensor) and (result.requires_grad or not torch.is_grad_enabled())


def _swapped(item: Any, copies: Mapping[int, Tensor]) -> Any:
    if isinstance(item, list | tuple) and any(True for _ in _tensors(item)):
        return [_swapped(part, copies) for part in item]
    return copies.get(id(item), item)


def _needs_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad
