"""The one door to autograd's engine.

`torch.autograd.backward` checks symbolic shapes in Python before it starts, at 35 µs a call, twice
what the engine needs for a small graph; ranks that share an interpreter wait for each other there.
The engine itself is reached by a private name, so where that is gone the public one is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Roots = Sequence[GradientEdge]
_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def backward(roots: Roots, seeds: Sequence[Tensor]) -> None:
    """Add to the `.grad` of all leaves."""
    if _ENGINE is None:
        torch.autograd.backward(roots, seeds)
    else:
        _ENGINE.run_backward(tuple(roots), tuple(seeds), False, False, (), True, True)


def backward_to(leaves: Sequence[Tensor], roots: Roots, seeds: Sequence[Tensor]) -> None:
    """Add to the `.grad` of these leaves only."""
    if _ENGINE is None:
        torch.autograd.backward(roots, seeds, inputs=leaves)
    else:
        _ENGINE.run_backward(tuple(roots), tuple(seeds), False, False, tuple(leaves), True, True)


def gradients(
    leaves: Sequence[Tensor], roots: Roots, seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Of these leaves; the graph stays, for another backward."""
    if _ENGINE is None:
        return torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)
    found: tuple[Tensor | None, ...] = _ENGINE.run_backward(
        tuple(roots), tuple(seeds), True, False, tuple(leaves), True, False
    )
    return found


def leaves(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors to which a backward from these roots brings gradients, each once."""
    waiting: list[Any] = [each.grad_fn for each in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):  # a node that adds to a leaf's gradient
                yield node.variable
            waiting += (following for following, _ in node.next_functions)


def root(tensor: Tensor, seed: Tensor) -> GradientEdge:
    """Return where a backward starts; a seed of another shape would be added up without a word."""
    if tensor.shape != seed.shape:
        raise RuntimeError(
            f"a gradient has shape {tuple(seed.shape)}, but its value {tuple(tensor.shape)}"
        )
    return get_gradient_edge(tensor)
