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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.overrides import TorchFunctionMode

from stageline.runtime.engine import autograd as engine
from stageline.runtime.exactness.inner_gradients import (
    DIFFERENTIATES,
    Inner,
    RepeatForward,
    is_transformed,
    too_late,
)

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
class Forward:
    """The forward that calls are caught in. It does not hold the calls, which hold it.

    `is_nested`: a hook takes gradients of its own, in the middle of the stage's backward.
    """

    inner: Inner
    is_over: bool = False
    is_nested: bool = False


@dataclass
class Caught:
    """One call: its small graph, and the gradient of its output once that has arrived."""

    forward: Forward
    layer: int
    leaves: list[Tensor]  # copies of the inputs that need a gradient
    weights: list[nn.Parameter]
    outputs: list[GradientEdge]  # of its graph, which does not need the data
    linear: tuple[Any, ...]  # the arguments, if it is a linear
    gradients: tuple[Tensor | None, ...] = ()


class CatchWeights(TorchFunctionMode):
    """In force while a stage runs forward; `calls` fills up in the order of the calls.

    If it `watches`, only layers that are known to differentiate nothing are caught, and of the
    others it is noted what they do. State: the layer that runs, the calls, and how weights were
    used.
    """

    def __init__(
        self, known: Inner | None = None, *, catches: bool = True, watches: bool = False
    ) -> None:
        super().__init__()
        self.known, self.catches, self.watches = known or Inner(), catches, watches
        self.forward = Forward(self.known)
        self.layer = 0  # its number
        self.calls: list[Caught] = []
        self.used: dict[int, tuple[Tensor, int]] = {}  # by id: weights to be caught, their layer
        self.direct: dict[int, Tensor] = {}  # by id: weights that functions use uncaught
        self.anchor = torch.empty(0, requires_grad=True)  # so that a gradient always arrives

    def __exit__(self, *error: object) -> None:
        self.forward.is_over = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values()) if kwargs else args
        weights = _weights(given)
        if func in DIFFERENTIATES or (self.watches and is_transformed(given)):
            self._differentiate(weights)
        if not weights:
            return func(*args, **kwargs)
        if func in CAUGHT and torch.is_grad_enabled() and self._may_catch(weights, given):
            if not self.catches or (self.watches and not self.known.is_harmless(self.layer)):
                return func(*args, **kwargs)
            return self._catch(func, args, kwargs, weights)
        result = func(*args, **kwargs)
        if _is_use(result):
            self.direct |= {id(weight): weight for weight in weights}
            self._check(weights)
        return result

    def _may_catch(self, weights: list[nn.Parameter], given: tuple[Any, ...]) -> bool:
        """Whether a call is one of those that are caught, now or after the first step."""
        if self.known.is_direct(self.layer):
            return False
        if is_transformed(given):
            self._differentiate([])
            return False
        for weight in weights:
            self.used.setdefault(id(weight), (weight, self.layer))
        return self._check(weights)

    def _differentiate(self, weights: list[nn.Parameter]) -> None:
        """The layer takes gradients, maybe of these weights, or transforms a function."""
        if not self.known.is_given:
            layers = {self.used[id(weight)][1] for weight in weights if id(weight) in self.used}
            self.known.note({self.layer, *layers})
            self._begin_again(lambda call: call.layer in {self.layer, *layers})

    def _check(self, weights: list[nn.Parameter]) -> bool:
        """Layers that use a weight in both ways are not caught; False if there are any."""
        if not self.direct or self.known.is_given:
            return True
        both = [w for w in weights if id(w) in self.used and id(w) in self.direct]
        if not both:
            return True
        self.known.direct |= {self.layer, *(self.used[id(weight)][1] for weight in both)}
        self._begin_again(lambda call: call.layer in self.known.direct)
        return False

    def _begin_again(self, is_wrong: Callable[[Caught], bool]) -> None:
        if any(map(is_wrong, self.calls)):
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
        call = Caught(self.forward, self.layer, list(copies.values()), weights, outputs, given)
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
        forward = call.forward
        if not forward.is_over or forward.is_nested or torch.is_grad_enabled():
            # not the stage's own backward
            forward.inner.note({call.layer})
            is_late = forward.is_over or forward.inner.is_given
            raise too_late() if is_late else RepeatForward()
        call.gradients = gradients
        arrived = _arrived(call)
        if not call.leaves or not arrived:
            return None, None, None, *(None for _ in call.leaves)
        outputs, found = zip(*arrived, strict=True)
        return None, None, None, *engine.gradients(call.leaves, outputs, found)


class InBackward(TorchFunctionMode):
    """In force during the first half of a backward: hooks may take gradients as well.

    Through graphs of layers that are not caught they can. In its first step a stage has hardly any
    others, and it keeps those that it has not caught by then.
    """

    def __init__(self, known: Inner, calls: Sequence[Caught]) -> None:
        super().__init__()
        self.known, self.calls = known, calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in DIFFERENTIATES:
            return func(*args, **kwargs)
        self.known.note_hook()
        if not self.calls:
            return func(*args, **kwargs)
        given = {id(weight) for weight in _weights((*args, *kwargs.values()))}
        if any(id(weight) in given for call in self.calls for weight in call.weights):
            raise too_late()
        forward = self.calls[0].forward
        forward.is_nested = True
        try:
            return func(*args, **kwargs)
        finally:
            forward.is_nested = False


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
    found: list[nn.Parameter] = []
    for item in items:
        kind = type(item)
        if kind is nn.Parameter:
            if item.requires_grad:
                found.append(item)
        elif kind is list or kind is tuple:
            found += _weights(item)
        # asking any other tensor whether it is a parameter costs a microsecond
        elif kind is not Tensor and isinstance(item, Tensor) and _is_trained(item):
            found.append(item)
    return list({id(weight): weight for weight in found}.values()) if len(found) > 1 else found


def _is_trained(item: Tensor) -> TypeGuard[nn.Parameter]:
    return isinstance(item, nn.Parameter) and item.requires_grad


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
