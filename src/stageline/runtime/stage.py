"""One stage at work: its layers forward and backward, and what it holds between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from stageline.model.layers import LayerSequence, Value
from stageline.runtime.ambient import Ambient
from stageline.runtime.batch_norm import Statistics
from stageline.runtime.randomness import drawing, layer_seed, may_draw
from stageline.runtime.split_backward import CatchWeights, Caught, add_weight_gradients
from stageline.runtime.tied import TiedWeights

Values = Mapping[Value, Any]
# The gradients of a value's tensors, by the number of the layer that read it.
Gradients = dict[Value, list[tuple[int, list[torch.Tensor | None]]]]


@dataclass(frozen=True)
class Target:
    """What the last stage compares its output with, and how much this micro-batch counts."""

    loss_fn: Callable[[Any, Any], torch.Tensor]
    target: Any
    weight: float

    def loss(self, output: Any) -> torch.Tensor:
        return self.loss_fn(output, self.target)


@dataclass(frozen=True)
class Pass:
    """All that the forward of a micro-batch depends on, to run it once or once again."""

    microbatch: int
    values: Values  # what the stage reads
    target: Target | None  # on the last stage
    seed: int
    step: int
    ambient: Ambient
    in_halves: bool  # the backward comes as I and W
    recompute: bool  # keep only what is read, and run forward again before the backward


@dataclass(frozen=True)
class Graph:
    """What a forward leaves behind for its backward."""

    reads: dict[tuple[int, Value], Any]  # by layer and value: leaves that collect gradients
    writes: dict[Value, Any]  # values that later stages read
    loss: torch.Tensor | None
    calls: list[Caught]  # that use weights, if the backward comes in halves


class Stage:
    """A run of layers. State: what waits for a backward, by micro-batch."""

    def __init__(
        self,
        layers: LayerSequence,
        numbers: range,
        sent: Iterable[Value],
        tied: TiedWeights,
        batch_norm: str,
    ) -> None:
        self.layers, self.numbers, self.tied = layers, numbers, tied
        output = {layers.output} if layers.output.writer in numbers else set()
        self.sent = frozenset(sent) | output
        modules = [layers.layers[number].module for number in numbers]
        self.random = {n for n, module in zip(numbers, modules, strict=True) if may_draw(module)}
        self.statistics = Statistics.of(modules, batch_norm)
        self.passes: dict[int, Pass] = {}  # between a forward and its recomputation
        self.graphs: dict[int, Graph] = {}  # between a forward and its backward
        self.owed: dict[int, list[Caught]] = {}  # weight gradients, between I and W
        self.at_work = ""  # the name of the layer that runs, for errors

    def finish(self) -> None:
        """At the end of a step."""
        self.statistics.update()

    def clear(self) -> None:
        """Forget what a step that failed has left behind."""
        self.statistics.seen.clear()
        self.passes.clear()
        self.graphs.clear()
        self.owed.clear()

    def forward(self, this: Pass) -> tuple[dict[Value, Any], torch.Tensor | None]:
        """Run the layers; gives back the values that later stages read, and the loss."""
        graph = self._run(this, grad=not this.recompute, again=False)
        if this.recompute:
            self.passes[this.microbatch] = this
        else:
            self.graphs[this.microbatch] = graph
        written = {value: pytree.tree_map(_leaf, tree) for value, tree in graph.writes.items()}
        if this.recompute:  # without a graph nothing seems to need gradients
            written = {value: pytree.tree_map(_wanted, tree) for value, tree in written.items()}
        return written, None if graph.loss is None else graph.loss.detach()

    def run_only(self, this: Pass) -> Values:
        """A forward that no backward follows; gives back what others read, and the output."""
        return self._run(this, grad=False, again=False).writes

    def prepare_backward(self, microbatch: int) -> None:
        """Recompute what was not kept; this need not wait for the gradient to arrive."""
        if microbatch in self.passes:
            self.graphs[microbatch] = self._run(self.passes.pop(microbatch), grad=True, again=True)

    def backward(self, microbatch: int, gradients: Gradients, target: Target | None) -> Gradients:
        """Take gradients back to what was read, and to the weights whose use was not caught."""
        graph = self.graphs.pop(microbatch)
        roots, seeds = [], []
        for value, tree in graph.writes.items():
            for tensor, seed in zip(_tensors(tree), _sums(gradients.get(value, [])), strict=False):
                if tensor.requires_grad and seed is not None:
                    roots.append(tensor)
                    seeds.append(seed)
        if graph.loss is not None and target is not None:
            roots.append(graph.loss)
            seeds.append(torch.full_like(graph.loss, target.weight))
        if roots:
            torch.autograd.backward(roots, seeds)
        if graph.calls:
            self.owed[microbatch] = graph.calls
        back: Gradients = {}
        for (number, value), tree in graph.reads.items():
            back.setdefault(value, []).append((number, [leaf.grad for leaf in _tensors(tree)]))
        return back

    def weight_gradients(self, microbatch: int) -> None:
        """What an I left to do."""
        add_weight_gradients(self.owed.pop(microbatch, []))

    def _run(self, this: Pass, *, grad: bool, again: bool) -> Graph:
        reads: dict[tuple[int, Value], Any] = {}
        written: dict[Value, Any] = {}
        catch = CatchWeights() if this.in_halves and grad else nullcontext()
        watch = self.statistics.watch(this.microbatch, again=again)
        with this.ambient.again(grad=grad), catch as caught, watch:
            for number in self.numbers:
                self._run_layer(number, this, reads, written)
            loss = this.target.loss(written[self.layers.output]) if this.target else None
        writes = {value: written[value] for value in self.sent}
        return Graph(reads, writes, loss, caught.calls if caught else [])

    def _run_layer(
        self,
        number: int,
        this: Pass,
        reads: dict[tuple[int, Value], Any],
        written: dict[Value, Any],
    ) -> None:
        layer, sources = self.layers.layers[number], self.layers.sources[number]
        self.at_work = layer.name
        for value in sources:
            if value not in written:
                reads[number, value] = pytree.tree_map(_leaf, this.values[value])
        seed = layer_seed(this.seed, this.step, this.microbatch, layer.name)
        with drawing(seed) if number in self.random else nullcontext():
            arguments = tuple(written[v] if v in written else reads[number, v] for v in sources)
            if doubles := self.tied.by_layer.get(number):
                result = functional_call(layer.module, doubles, arguments)
            else:
                result = layer.module(*arguments)
        results = result if len(layer.writes) > 1 else (result,)
        written |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}


def _leaf(item: Any) -> Any:
    """The same tensor at the edge of a graph of its own; anything else as it is."""
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().requires_grad_(item.requires_grad)


def _wanted(item: Any) -> Any:
    """A tensor whose gradient may be wanted: all that can have one."""
    if not isinstance(item, torch.Tensor):
        return item
    return item.requires_grad_(item.is_floating_point() or item.is_complex())


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
