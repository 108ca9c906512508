"""The border of a stage: tensors enter its graph here, and their gradients leave it here.

    other stage ── x ──►┊ Enter ── x' ─► layers …          x' is no leaf, as in an uncut model
                ◄── dx ─┊ ◄─────── dx'

A gradient is taken as the graph delivers it. A leaf's `.grad` would have the leaf's strides, and
later sums and products round differently for other strides.

What later stages send for a value that they read as well is the first term of its sum here, because
autograd adds the gradients of a value from its last use to its first:

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
class Inbox:
    """Where the graph leaves the gradients. It knows no node of the graph, which knows it."""

    is_awaited: bool = False  # whether the stage's own backward runs
    arrived: tuple[Tensor | None, ...] = ()


class Entry:
    """The tensors that enter a stage for one micro-batch. State: their gradients, once computed."""

    def __init__(self) -> None:
        self.edges: dict[int, GradientEdge] = {}  # by position, of tensors that need a gradient
        self.inbox = Inbox()

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as the stage's layers see them."""
        needy = [i for i, tensor in enumerate(tensors) if _needs_gradient(tensor)]
        entered = [tensor.detach() for tensor in tensors]
        if needy:
            anchor = torch.empty(0, requires_grad=True)  # makes the outputs part of a graph
            found = _Enter.apply(self.inbox, anchor, *(entered[i] for i in needy))  # type: ignore[no-untyped-call]
            for position, tensor in zip(needy, found, strict=True):
                entered[position] = tensor
                self.edges[position] = get_gradient_edge(tensor)
        return entered

    def gradients(self) -> dict[int, Tensor | None]:
        """Return the gradients by position, and forget them."""
        found = self.inbox.arrived or (None,) * len(self.edges)
        self.inbox.arrived = ()
        return dict(zip(self.edges, found, strict=True))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inbox: Inbox, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inbox = inbox
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        inbox: Inbox = ctx.inbox
        if not inbox.is_awaited:
            raise ModelError(
                "a backward() inside a forward goes through what it was given to the layers of "
                "earlier stages, which it cannot reach from here: detach() what it was given "
                "before, put the layers into one stage, or return the loss and add it to the "
                "model's"
            )
        inbox.arrived = gradients
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
