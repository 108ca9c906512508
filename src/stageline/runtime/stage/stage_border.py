"""The border of a stage's graph: tensors enter the graph here, and their gradients leave it here.

    other stage ── x ──►┊ enter ── x' ─► layers …          x' is no leaf, as in an uncut model
                ◄── dx ─┊ ◄─────── dx'

A gradient is taken as the graph delivers it. A leaf's `.grad` would have the leaf's strides, and
later sums and products round differently for other strides.

The gradient that later stages send for a value that this stage reads too is the first term of its
sum, because autograd adds the gradients of a value from its last use to its first:

    readers of v: stage 1 (twice: a, b), stage 2 (once: c)       dv = ((c + b) + a) + …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stageline.errors import ModelError


@dataclass
class InputGradients:
    """The gradients of a graph's inputs. It does not refer to the graph, which refers to it."""

    is_expected: bool = False  # whether the stage's own backward runs
    gradients: tuple[Tensor | None, ...] = ()


class GraphInputs:
    """The tensors that enter a stage for one micro-batch. State: their gradients, once computed."""

    def __init__(self) -> None:
        self.edges: dict[int, GradientEdge] = {}  # by position, of tensors that need a gradient
        self.store = InputGradients()

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as the stage's layers see them."""
        differentiable = [i for i, tensor in enumerate(tensors) if _needs_gradient(tensor)]
        entered = [tensor.detach() for tensor in tensors]
        if differentiable:
            anchor = torch.empty(0, requires_grad=True)  # makes the outputs part of a graph
            found = _Enter.apply(self.store, anchor, *(entered[i] for i in differentiable))  # type: ignore[no-untyped-call]
            for position, tensor in zip(differentiable, found, strict=True):
                entered[position] = tensor
                self.edges[position] = get_gradient_edge(tensor)
        return entered

    def take_gradients(self) -> dict[int, Tensor | None]:
        """Return the gradients by position, and release them."""
        found = self.store.gradients or (None,) * len(self.edges)
        self.store.gradients = ()
        return dict(zip(self.edges, found, strict=True))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: InputGradients, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.store = store
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        store: InputGradients = ctx.store
        if not store.is_expected:
            raise ModelError(
                "a backward() inside a forward continues through the stage's input to layers of "
                "earlier stages, which it cannot reach from here: detach() the input before, put "
                "the layers into one stage, or return the loss and add it to the model's"
            )
        store.gradients = gradients
        return None, None, *(None for _ in gradients)


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def gradients_by_value(
    counts: Mapping[Any, int], by_position: Mapping[int, Tensor | None]
) -> dict[Any, list[Tensor | None]]:
    """Return for each value the gradients of its tensors; `counts` says how many it has."""
    found, start = {}, 0
    for value, count in counts.items():
        found[value] = [by_position.get(start + i) for i in range(count)]
        start += count
    return found
