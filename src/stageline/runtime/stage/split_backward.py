"""The split backward: gradients of inputs first (I), of weights later (W), with autograd's bits.

Calls that use weights were intercepted in the forward (`weight_calls.py`). When the gradient of a
call's output arrives (I), autograd takes it to the call's inputs and no further, and the gradient
is kept. Later (W) autograd takes it to the weights. What is held in between is what the calls'
small graphs hold. Weights of functions that are not intercepted get their gradients during I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from stageline.model.function_interceptor import FunctionInterceptor
from stageline.runtime.exactness.gradient_types import gradient_type
from stageline.runtime.exactness.inner_gradients import (
    DIFFERENTIATING,
    InnerGradients,
    late_differentiation,
)
from stageline.runtime.stage import autograd
from stageline.runtime.stage.weight_calls import WeightCall, trained_weights
from stageline.torch_private import has_gradient_hooks


class HookGradients(FunctionInterceptor):
    """Observes hooks that take gradients themselves during the first half of a backward.

    They may do so through graphs of layers that are not intercepted. In its first step a stage has
    hardly any others, and layers that are not intercepted by then never are.
    """

    def __init__(self, known: InnerGradients, calls: Sequence[WeightCall]) -> None:
        super().__init__()
        self.known, self.calls = known, calls

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in DIFFERENTIATING:
            return func(*args, **kwargs)
        self.known.record_hook()
        if not self.calls:
            return func(*args, **kwargs)
        given = {id(weight) for weight in trained_weights((*args, *kwargs.values()))}
        if any(id(weight) in given for call in self.calls for weight in call.weights):
            raise late_differentiation()
        forward = self.calls[0].forward
        forward.is_in_hook = True
        try:
            return func(*args, **kwargs)
        finally:
            forward.is_in_hook = False


def add_weight_gradients(calls: Iterable[WeightCall], *, fused: bool = False) -> None:
    """Take gradients from the calls to the weights: `.grad` changes as autograd changes it.

    One backward for all calls, so that the uses of a weight are added to each other first, the last
    one first. `fused` accumulates those of matrix products inside the product.
    """
    ordinary = [call for call in calls if not (fused and _accumulate_in_product(call))]
    known = [pair for call in ordinary for pair in call.output_gradients()]
    if known:
        outputs, gradients = zip(*known, strict=True)
        weights = {id(weight): weight for call in ordinary for weight in call.weights}
        autograd.backward_to(list(weights.values()), outputs, gradients)


def _accumulate_in_product(call: WeightCall) -> bool:
    """Compute `grad += gradientᵀ · x` for a linear, without a matrix in between.

    About a third faster than a product and a sum, for 128 rows. Return False if the call is not a
    linear, or cannot be computed like this.
    """
    known = call.output_gradients()
    if not call.linear or not known:
        return False
    x, weight, *bias = call.linear
    gradient = known[0][1]
    parameters = [item for item in (weight, *bias) if item is not None]
    if not all(map(_is_parameter_without_hooks, parameters)):
        return False
    types = [x.dtype, gradient.dtype, *map(gradient_type, parameters)]
    if any(dtype != weight.dtype for dtype in types):
        return False  # autocast, or another `grad_dtype`: the product has another type than the sum
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


def _is_parameter_without_hooks(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and not has_gradient_hooks(weight)
