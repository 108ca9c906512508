"""One stage at work: its layers forward and backward, and what it holds between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stageline.model.layers import LayerSequence, Value
from stageline.runtime.split_backward import CatchWeights, Caught, add_weight_gradients

Values = Mapping[Value, Any]
# The gradients of a value's tensors, by the number of the layer that read it.
Gradients = dict[Value, list[tuple[int, list[torch.Tensor | None]]]]


@dataclass(frozen=True)
class Held:
    """What a micro-batch leaves behind on a stage until its backward."""

    reads: dict[tuple[int, Value], Any]  # by layer and value: leaves that collect gradients
    writes: dict[Value, Any]  # values that later stages read
    loss: torch.Tensor | None
    calls: list[Caught]  # that use weights, if the backward comes in halves


@dataclass(frozen=True)
class Target:
    """What the last stage compares its output with, and how much this micro-batch counts."""

    loss_fn: Callable[[Any, Any], torch.Tensor]
    target: Any
    weight: float

    def loss(self, output: Any) -> torch.Tensor:
        return self.loss_fn(output, self.target)


class Stage:
    """A run of layers. Its state is `held`: what waits for its backward, by micro-batch."""

    def __init__(self, layers: LayerSequence, numbers: range, sent: Iterable[Value]) -> None:
        self.layers, self.numbers, self.sent = layers, numbers, frozenset(sent)
        self.held: dict[int, Held] = {}
        self.owed: dict[int, list[Caught]] = {}  # weight gradients, between I and W
        self.at_work = ""  # the name of the layer that runs, for errors

    def forward(
        self, microbatch: int, values: Values, target: Target | None, *, in_halves: bool = False
    ) -> dict[Value, Any]:
        """Run the layers; gives back the values that later stages read."""
        catch = CatchWeights() if in_halves else nullcontext(None)
        with catch as caught:
            reads, written = self._run(values)
        writes = {value: written[value] for value in self.sent}
        loss = target.loss(written[self.layers.output]) if target else None
        self.held[microbatch] = Held(reads, writes, loss, caught.calls if caught else [])
        return {value: pytree.tree_map(_leaf, tree) for value, tree in writes.items()}

    def _run(self, values: Values) -> tuple[dict[tuple[int, Value], Any], dict[Value, Any]]:
        """What each layer read from outside, as leaves, and all that was written."""
        reads: dict[tuple[int, Value], Any] = {}
        written: dict[Value, Any] = {}
        for number in self.numbers:
            layer = self.layers.layers[number]
            self.at_work = layer.name
            for value in self.layers.sources[number]:
                if value not in written:
                    reads[number, value] = pytree.tree_map(_leaf, values[value])
            sources = self.layers.sources[number]
            result = layer.module(*(written.get(v, reads.get((number, v))) for v in sources))
            results = result if len(layer.writes) > 1 else (result,)
            written |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}
        return reads, written

    def backward(self, microbatch: int, gradients: Gradients, target: Target | None) -> Gradients:
        """Take gradients back to what was read, and to the weights whose use was not caught."""
        held = self.held.pop(microbatch)
        roots, seeds = [], []
        for value, tree in held.writes.items():
            for tensor, seed in zip(_tensors(tree), _sums(gradients.get(value, [])), strict=False):
                if tensor.requires_grad and seed is not None:
                    roots.append(tensor)
                    seeds.append(seed)
        if held.loss is not None and target is not None:
            roots.append(held.loss)
            seeds.append(torch.full_like(held.loss, target.weight))
        if roots:
            torch.autograd.backward(roots, seeds)
        if held.calls:
            self.owed[microbatch] = held.calls
        back: Gradients = {}
        for (number, value), tree in held.reads.items():
            back.setdefault(value, []).append((number, [leaf.grad for leaf in _tensors(tree)]))
        return back

    def weight_gradients(self, microbatch: int) -> None:
        """What an I left to do."""
        add_weight_gradients(self.owed.pop(microbatch, []))


def _leaf(item: Any) -> Any:
    """The same tensor at the edge of a graph of its own; anything else as it is."""
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().requires_grad_(item.requires_grad)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _sums(readers: list[tuple[int, list[torch.Tensor | None]]]) -> list[torch.Tensor | None]:
    """Gradients of several readers, the last layer's first: the order in which autograd adds."""
    total: list[torch.Tensor | None] = []
    for _, gradients in sorted(readers, key=lambda reader: reader[0], reverse=True):
        total = [_add(a, b) for a, b in zip(total, gradients, strict=True)] if total else gradients
    return total


def _add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a + b if a is not None and b is not None else b if a is None else a
