"""Intercept functions that use weights, so that the weights' gradients can be computed later.

While a stage runs forward, each such call runs in a small graph of its own, between copies of its
inputs and its output:

    ── x ──►┊ x' ─► linear(x', weight, bias) ─► y' ┊── y ──►      the stage's graph goes around it

A weight gets all of its gradient in one half of a split backward, or a sum would be rounded in
another order than autograd's: a layer that uses a weight both in intercepted and in other functions
is not intercepted at all, nor is one whose graph is differentiated by anything but the stage's own
backward (`inner_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from stageline.model.function_interceptor import FunctionInterceptor
from stageline.runtime.exactness.inner_gradients import (
    DIFFERENTIATING,
    InnerGradients,
    RepeatForward,
    is_transformed,
    late_differentiation,
)
from stageline.runtime.stage import autograd
from stageline.runtime.stage.embedding_gradients import LargeTables

# Not normalisations: both halves of their backward read the same values again. A ResNet's step took
# 10 % longer so, and AmoebaNet's 15 %, than with all of their gradients computed at once.
INTERCEPTED: frozenset[Callable[..., Any]] = frozenset(
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


# Between I and W a convolution's input and the gradient of its output are held, in memory that
# would be used again at once otherwise, and that is no longer in a cache by then. With fewer
# operations for each of these values it is cheaper to compute both gradients in I. Of AmoebaNet's
# convolutions these are 40 %, with 16 % of the operations; a step of ZB-V takes 7 % less so.
LEAST_OPERATIONS_PER_VALUE = 40
CONVOLUTIONS = frozenset({F.conv1d, F.conv2d, F.conv3d})

# Kinds of arguments that are no weights. Most are of these, and are not looked at any further.
WITHOUT_WEIGHTS = frozenset({Tensor, int, float, bool, str, type(None), torch.dtype})


@dataclass
class InterceptedForward:
    """The forward in which calls are intercepted. The calls refer to it, and not it to them.

    `is_in_hook`: a hook takes gradients of its own, in the middle of the stage's backward.
    """

    inner: InnerGradients
    is_over: bool = False
    is_in_hook: bool = False


@dataclass
class WeightCall:
    """One intercepted call: its small graph, and the gradient of its output once that is known."""

    forward: InterceptedForward
    layer: int
    leaves: list[Tensor]  # copies of the inputs that need a gradient
    weights: list[nn.Parameter]
    outputs: list[GradientEdge]  # of the graph, which does not need the data
    linear: tuple[Any, ...]  # the arguments, if it is a linear
    gradients: tuple[Tensor | None, ...] = ()

    def output_gradients(self) -> list[tuple[GradientEdge, Tensor]]:
        """Return the outputs that have a gradient, with it."""
        pairs = zip(self.outputs, self.gradients, strict=False)
        return [(output, gradient) for output, gradient in pairs if gradient is not None]


class WeightCallInterceptor(FunctionInterceptor):
    """Intercepts functions that use weights while a stage runs forward.

    If it `observes`, only layers that are known to differentiate nothing are intercepted, and what
    the others do is recorded. State: the layer that runs, the calls in their order, and how weights
    were used.
    """

    def __init__(
        self,
        known: InnerGradients | None = None,
        tables: LargeTables | None = None,
        *,
        intercepts: bool = True,
        observes: bool = False,
    ) -> None:
        super().__init__()
        self.known = known or InnerGradients()
        self.tables, self.intercepts, self.observes = tables, intercepts, observes
        self.forward = InterceptedForward(self.known)
        self.layer = 0  # its number
        self.calls: list[WeightCall] = []
        self.used: dict[int, tuple[Tensor, int]] = {}  # by id: intercepted weights, their layer
        self.direct: dict[int, Tensor] = {}  # by id: weights that other functions use
        self.anchor = torch.empty(0, requires_grad=True)  # so that a gradient always arrives

    def __exit__(self, *error: object) -> None:
        self.forward.is_over = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        weights = trained_weights(given)
        if func in DIFFERENTIATING or (self.observes and is_transformed(given)):
            self._record_differentiation(weights)
        if not weights:
            return func(*args, **kwargs)
        if (
            func in INTERCEPTED
            and torch.is_grad_enabled()
            and (func not in CONVOLUTIONS or is_worth_deferring(weights, args, kwargs))
            and self._may_intercept(weights, given)
        ):
            if not self.intercepts or (self.observes and not self.known.is_harmless(self.layer)):
                return func(*args, **kwargs)
            return self._intercept(func, args, kwargs, weights)
        result = func(*args, **kwargs)
        if _may_bring_gradient(result):
            self.direct |= {id(weight): weight for weight in weights}
            self._check_uses(weights)
        return result

    def _may_intercept(self, weights: list[nn.Parameter], given: tuple[Any, ...]) -> bool:
        """Return whether a call can be intercepted, now or after the first step."""
        if self.known.is_direct(self.layer):
            return False
        if is_transformed(given):
            self._record_differentiation([])
            return False
        for weight in weights:
            self.used.setdefault(id(weight), (weight, self.layer))
        return self._check_uses(weights)

    def _record_differentiation(self, weights: list[nn.Parameter]) -> None:
        """Record that the layer takes gradients, maybe of these weights, or uses a transform."""
        if not self.known.is_fixed:
            layers = {self.used[id(weight)][1] for weight in weights if id(weight) in self.used}
            self.known.record_differentiation({self.layer, *layers})
            self._repeat_if_any(lambda call: call.layer in {self.layer, *layers})

    def _check_uses(self, weights: list[nn.Parameter]) -> bool:
        """Return False if weights are used in intercepted and in other functions.

        Their layers are not intercepted from then on.
        """
        if not self.direct or self.known.is_fixed:
            return True
        both = [w for w in weights if id(w) in self.used and id(w) in self.direct]
        if not both:
            return True
        self.known.direct |= {self.layer, *(self.used[id(weight)][1] for weight in both)}
        self._repeat_if_any(lambda call: call.layer in self.known.direct)
        return False

    def _repeat_if_any(self, is_wrong: Callable[[WeightCall], bool]) -> None:
        if any(map(is_wrong, self.calls)):
            raise RepeatForward

    def _intercept(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: list[nn.Parameter],
    ) -> Any:
        inputs = _Inputs({}, {})
        args = tuple([inputs.replaced(item) for item in args])
        if kwargs:
            kwargs = {name: inputs.replaced(item) for name, item in kwargs.items()}
        result = self.tables.call(func, args, kwargs) if self.tables else func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        needed = [item for item in results if _needs_gradient(item)]
        outputs = [get_gradient_edge(item) for item in needed]
        linear = args if func is F.linear and not kwargs else ()
        copies = [*inputs.copies.values()]
        call = WeightCall(self.forward, self.layer, copies, weights, outputs, linear)
        self.calls.append(call)
        around = _AroundCall.apply(call, needed, self.anchor, *inputs.given.values())  # type: ignore[no-untyped-call]
        if not isinstance(result, tuple):
            return around[0] if needed else result
        outside = iter(around)
        return tuple(next(outside) if _needs_gradient(item) else item for item in results)


class _Inputs(NamedTuple):
    """The differentiable inputs of a call, by id, and the copies that take their places.

    What is passed several times, such as query and key, is one input with one gradient.
    """

    given: dict[int, Tensor]
    copies: dict[int, Tensor]

    def replaced(self, item: Any) -> Any:
        """Return an argument with copies of the inputs; `einsum` may have them in a list."""
        kind = type(item)
        if kind in WITHOUT_WEIGHTS and kind is not Tensor:
            return item
        if isinstance(item, Tensor):
            if not item.requires_grad or isinstance(item, nn.Parameter):
                return item
            key = id(item)
            if key not in self.copies:
                self.given[key], self.copies[key] = item, item.detach().requires_grad_()
            return self.copies[key]
        if isinstance(item, list | tuple) and not _has_numbers(item):
            return [self.replaced(part) for part in item]
        return item


class _AroundCall(torch.autograd.Function):
    """The node that the stage's graph has in place of a call."""

    @staticmethod
    def forward(
        ctx: Any, call: WeightCall, outputs: list[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: WeightCall = ctx.call
        forward = call.forward
        if not forward.is_over or forward.is_in_hook or torch.is_grad_enabled():
            # not the stage's own backward
            forward.inner.record_differentiation({call.layer})
            is_late = forward.is_over or forward.inner.is_fixed
            raise late_differentiation() if is_late else RepeatForward()
        call.gradients = gradients
        known = call.output_gradients()
        if not call.leaves or not known:
            return None, None, None, *(None for _ in call.leaves)
        outputs, found = zip(*known, strict=True)
        return None, None, None, *autograd.gradients(call.leaves, outputs, found)


def is_worth_deferring(
    weights: Iterable[nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether a convolution has many operations for each value that is held for its W.

    By the weight's shape alone, so that all micro-batches are treated alike.

    >>> kinds = nn.Conv2d(64, 64, 1), nn.Conv2d(32, 32, 1), nn.Conv2d(64, 64, 3, groups=64)
    >>> [is_worth_deferring([k.weight, k.bias], (), {"groups": k.groups}) for k in kinds]
    [True, False, False]
    """
    groups: int = args[6] if len(args) > 6 else kwargs.get("groups", 1)
    for weight in weights:
        if weight.dim() > 1:  # not the bias
            num_outputs, inputs_of_group = weight.shape[:2]
            operations = 2 * weight.numel()  # for one position in the output
            num_values = num_outputs + inputs_of_group * groups
            return operations >= LEAST_OPERATIONS_PER_VALUE * num_values
    return False


def trained_weights(items: Iterable[Any]) -> list[nn.Parameter]:
    """Return the parameters among arguments that need a gradient, each once."""
    found: list[nn.Parameter] = []
    for item in items:
        kind = type(item)
        if kind in WITHOUT_WEIGHTS:  # asking whether a tensor is a parameter costs a microsecond
            continue
        if kind is nn.Parameter:
            if item.requires_grad:
                found.append(item)
        elif kind is list or kind is tuple:
            if not _has_numbers(item):
                found += trained_weights(item)
        elif isinstance(item, Tensor) and _is_trained(item):
            found.append(item)
    return list({id(weight): weight for weight in found}.values()) if len(found) > 1 else found


def _is_trained(item: Tensor) -> TypeGuard[nn.Parameter]:
    return isinstance(item, nn.Parameter) and item.requires_grad


def _has_numbers(items: Sequence[Any]) -> bool:
    """Return whether it is a sequence of numbers, such as the strides of a convolution."""
    return not items or type(items[0]) is type(items[-1]) is int


def _may_bring_gradient(result: Any) -> bool:
    """Return whether a gradient may come back from a result to the weights that went in.

    It may even without a graph: a function that records its own graph later, as a checkpoint does
    in its backward, runs without one.
    """
    if isinstance(result, list | tuple):
        return any(map(_may_bring_gradient, result))
    return isinstance(result, Tensor) and (result.requires_grad or not torch.is_grad_enabled())


def _needs_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad
