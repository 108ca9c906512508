"""Gradients of a pipeline's inputs, passed on to what made them."""

from __future__ import annotations

from itertools import zip_longest

from torch import Tensor

from stageline.model import trees
from stageline.model.layers import INPUT, Value
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.exactness.caller_context import outside_autocast
from stageline.runtime.stage import autograd


def share(minibatch: MiniBatch, collectives: Collectives) -> None:
    """Give all ranks the gradients of the inputs: what made these is on all ranks."""
    if _require_gradients(minibatch):
        found = collectives.gather(minibatch.input_gradients, "gradients of inputs")
        minibatch.input_gradients = {key: grads for each in found for key, grads in each.items()}


def pass_back(minibatch: MiniBatch) -> None:
    """Take gradients on to what made the inputs, if they are part of a graph."""
    if not _require_gradients(minibatch):
        return
    found = [(t, g) for t, g in of_inputs(minibatch) if g is not None]
    if found:
        roots = [autograd.root(tensor, gradient) for tensor, gradient in found]
        with outside_autocast():
            autograd.backward(roots, [gradient for _, gradient in found])


def _require_gradients(minibatch: MiniBatch) -> bool:
    trees_of_all = (tree for part in minibatch.inputs for tree in part.values())
    return any(tensor.requires_grad for tree in trees_of_all for tensor in trees.tensors(tree))


def of_inputs(minibatch: MiniBatch) -> list[tuple[Tensor, Tensor | None]]:
    """Return the inputs that require gradients, and their gradients."""
    return [
        (tensor, gradient)
        for microbatch, part in enumerate(minibatch.inputs)
        for name, tree in part.items()
        for tensor, gradient in zip_longest(
            trees.tensors(tree), minibatch.input_gradients.get((microbatch, Value(INPUT, name)), ())
        )
        if tensor.requires_grad
    ]
