"""Run autograd's engine over part of a graph, and find the leaves of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from stageline.torch_private import run_backward

Root = Tensor | GradientEdge
Roots = Sequence[Root]


def backward(roots: Roots, seeds: Sequence[Tensor]) -> None:
    """Add to the `.grad` of all leaves."""
    run_backward(roots, seeds)


def backward_to(leaves: Sequence[Tensor], roots: Roots, seeds: Sequence[Tensor]) -> None:
    """Add to the `.grad` of these leaves only."""
    run_backward(roots, seeds, leaves)


def gradients(
    leaves: Sequence[Tensor], roots: Roots, seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of these leaves, and keep the graph for another backward."""
    return run_backward(roots, seeds, leaves, accumulate=False)


def leaves(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor once to which a backward from these roots brings a gradient."""
    pending: list[Any] = [each.grad_fn for each in roots]
    visited = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            if hasattr(node, "variable"):  # a node that adds to a leaf's gradient
                yield node.variable
            pending += (following for following, _ in node.next_functions)


def root(tensor: Tensor, seed: Tensor) -> Root:
    """Return where a backward from this tensor starts.

    Raise RuntimeError if its gradient `seed` has another shape, which the engine would sum
    silently.
    """
    if tensor.shape != seed.shape:
        raise RuntimeError(
            f"a gradient has shape {tuple(seed.shape)}, but its tensor has {tuple(tensor.shape)}"
        )
    return tensor
