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

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stageline.errors import ModelError


@dataclass(slots=True)
class InputGradients:
    """The gradients of a graph's inputs. It does not refer to the graph, which refers to it."""

    is_expected: bool = False  # whether the stage's own backward runs
    gradients: tuple[Tensor | None, ...] = ()


class GraphInputs:
    """The tensors that enter a stage for one micro-batch. State: their gradients, once computed."""

    def __init__(self) -> None:
        self.differentiable: list[int] = []  # positions of tensors that need a gradient
        self.edges: dict[int, GradientEdge] = {}  # by position, of those that later stages read
        self.store = InputGradients()

    def enter(self, tensors: Sequence[Tensor], read_later: Container[int] = ()) -> list[Tensor]:
        """Return the tensors as the stage's layers see them.

        `read_later` are the positions of those whose gradient from later stages is to come in here.
        """
        entered = [tensor.detach() for tensor in tensors]
        if torch.is_grad_enabled():
            self.differentiable = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        if self.differentiable:
            anchor = torch.empty(0, requires_grad=True)  # makes the outputs part of a graph
            given = [entered[i] for i in self.differentiable]
            found = _Enter.apply(self.store, anchor, *given)  # type: ignore[no-untyped-call]
            for position, tensor in zip(self.differentiable, found, strict=True):
                entered[position] = tensor
                if position in read_later:
                    self.edges[position] = get_gradient_edge(tensor)
        return entered

    def take_gradients(self) -> dict[int, Tensor | None]:
        """Return the gradients by position, and release them."""
        found = self.store.gradients or (None,) * len(self.differentiable)
        self.store.gradients = ()
        return dict(zip(self.differentiable, found, strict=True))


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


def gradients_by_value(
    tensors: Mapping[Any, Sequence[Tensor]], by_position: Mapping[int, Tensor | None]
) -> dict[Any, list[Tensor | None]]:
    """Return for each value the gradients of its tensors."""
    gradients = map(by_position.get, count())
    return {value: [*islice(gradients, len(own))] for value, own in tensors.items()}
