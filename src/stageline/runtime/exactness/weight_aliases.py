"""Aliases that take the place of a weight in a layer, and the hooks on the weight itself.

An alias has its own memory and gradient, or those of a weight version. Everything else is the
weight's: its class, its attributes, its hooks and the type of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.runtime.exactness.gradient_types import adopt_gradient_type
from stageline.torch_private import (
    gradient_hooks,
    make_subclass,
    post_accumulate_hooks,
    version_of,
    without_subclass_functions,
)


def make_alias(weight: nn.Parameter, data: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a parameter in the memory of `data` with the weight's class and attributes."""
    kind = type(weight)
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter):
        alias: nn.Parameter = make_subclass(kind, data, requires_grad=requires_grad)
    else:
        alias = nn.Parameter(data, requires_grad=requires_grad)
    if not hasattr(kind, "__tensor_flatten__"):  # or its attributes are its memory
        alias.__dict__ = weight.__dict__
    adopt_gradient_type(alias, weight)
    return alias


def plain_data(weight: nn.Parameter) -> Tensor:
    """Return the weight's memory, without its class if that is a subclass of Parameter."""
    if issubclass(type(weight), nn.Parameter):
        with without_subclass_functions():
            return weight.detach()
    return weight.detach()


def apply_gradient_hooks(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient after the weight's hooks have seen it."""
    for hook in gradient_hooks(weight):
        result: Tensor | None = hook(gradient)
        gradient = gradient if result is None else result
    return gradient


def run_post_hooks(weight: nn.Parameter, alias: nn.Parameter) -> None:
    """Run the weight's post-accumulate hooks, with the alias's gradient in the weight's place."""
    hooks = post_accumulate_hooks(weight)
    if not hooks:
        return
    version = version_of(weight)
    weight.grad, alias.grad = alias.grad, None
    for hook in hooks:
        hook(weight)
    alias.grad, weight.grad = weight.grad, None
    if version_of(weight) != version:
        raise _changed_by_hook()


class UnchangedWeights:
    """Weights with post-accumulate hooks, which must not change in the middle of a step.

    In a plain loop the next micro-batch would see the change.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self.versions = {w: version_of(w) for w in weights if post_accumulate_hooks(w)}

    def check(self) -> None:
        """Raise ModelError if a hook changed one of them."""
        if self.versions and any(version_of(w) != number for w, number in self.versions.items()):
            raise _changed_by_hook()


@contextmanager
def restored_after_hooks(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore, on leaving, the weights that post-accumulate hooks may change."""
    before = [(w, w.detach().clone()) for w in weights if post_accumulate_hooks(w)]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, data in before:
                weight.copy_(data)


def _changed_by_hook() -> ModelError:
    return ModelError(
        "a post-accumulate hook changed a weight in the middle of a step, but other micro-batches "
        "still compute with the old weights, where a plain loop would use the new ones: use "
        "num_microbatches=1, or step the optimizer after the step"
    )
