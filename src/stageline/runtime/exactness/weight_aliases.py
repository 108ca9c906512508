"""Doubles that stand for a weight in a layer, and the hooks that the weight's owner gave it.

A double has memory and gradients of its own, or those of a version; everything else is the
weight's: its class, its attributes, and its hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stageline.errors import ModelError


def double_of(weight: nn.Parameter, data: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of the weight's class on `data`, which has the weight's attributes."""
    kind = type(weight)
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  the class may wrap results
            double = Tensor._make_subclass(kind, data.detach(), requires_grad)  # noqa: SLF001
    else:
        double = nn.Parameter(data, requires_grad=requires_grad)
    if not hasattr(kind, "__tensor_flatten__"):  # or its attributes are its memory
        double.__dict__ = weight.__dict__
    return double


def data_of(weight: nn.Parameter) -> Tensor:
    """The weight's memory, without its class if that is one of parameters."""
    if issubclass(type(weight), nn.Parameter):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return weight.detach()
    return weight.detach()


def is_hooked(weight: Tensor) -> bool:
    """Whether its owner wants to see the gradients of a weight."""
    return bool(weight._backward_hooks) or has_post_hooks(weight)  # noqa: SLF001


def has_post_hooks(weight: Tensor) -> bool:
    return bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def hooked(weight: Tensor, gradient: Tensor) -> Tensor:
    """What the hooks of a weight make of a gradient."""
    for hook in list((weight._backward_hooks or {}).values()):  # noqa: SLF001
        result: Tensor | None = hook(gradient)
        gradient = gradient if result is None else result
    return gradient


def run_post_hooks(weight: nn.Parameter, double: nn.Parameter) -> None:
    """Run what is called after a gradient was added, which is the double's for now."""
    if not has_post_hooks(weight):
        return
    version = weight._version  # noqa: SLF001
    weight.grad, double.grad = double.grad, None
    for hook in list(weight._post_accumulate_grad_hooks.values()):  # noqa: SLF001
        hook(weight)
    double.grad, weight.grad = weight.grad, None
    if weight._version != version:  # noqa: SLF001
        raise changed_by_hook()


class Unchanged:
    """Weights that hooks could change: in a plain loop the next micro-batch would see that."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self.versions = {w: w._version for w in weights if has_post_hooks(w)}  # noqa: SLF001

    def check(self) -> None:
        if any(weight._version != version for weight, version in self.versions.items()):  # noqa: SLF001
            raise changed_by_hook()


@contextmanager
def kept(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put back what hooks do to weights."""
    before = [(weight, weight.detach().clone()) for weight in weights if has_post_hooks(weight)]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, data in before:
                weight.copy_(data)


def changed_by_hook() -> ModelError:
    return ModelError(
        "a weight was changed in the middle of a step, by a post-accumulate hook on it, but other "
        "micro-batches are on their way with the weights as they were, where a plain loop would "
        "give them the new ones: use num_microbatches=1, or step the optimizer after the step"
    )
