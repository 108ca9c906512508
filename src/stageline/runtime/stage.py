"""One stage at work: its layers forward and backward, and what it holds between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils import _pytree as pytree

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence, Value
from stageline.runtime.ambient import Ambient
from stageline.runtime.batch_norm import Statistics
from stageline.runtime.randomness import drawing, is_of_torch, layer_seed, may_draw
from stageline.runtime.split_backward import CatchWeights, Caught, add_weight_gradients
from stageline.runtime.tied import TiedWeights

NOTHING = torch.empty(0)
LOSS = "loss_fn"  # in the place of a layer's name
PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout)
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

    reads: dict[tuple[int, Value], list[torch.Tensor]]  # by layer: leaves that collect gradients
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
        pairs = list(zip(numbers, modules, strict=True))
        self.random = {number for number, module in pairs if may_draw(module)}
        self.in_place = {number for number, module in pairs if may_write_in_place(module)}
        names = [layers.layers[number].name for number in numbers]
        self.name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
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
        # torch takes other kernels, with other bits, where no graph is recorded; so one is, and
        # what it would save for the backward is dropped at once
        keep = saved_tensors_hooks(_nothing, _nothing) if this.recompute else nullcontext()
        with keep:
            graph = self._run(this, grad=True, again=False)
        if this.recompute:
            self.passes[this.microbatch] = this
        else:
            self.graphs[this.microbatch] = graph
        written = {value: pytree.tree_map(_leaf, tree) for value, tree in graph.writes.items()}
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
        self.at_work = self.name
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
            back.setdefault(value, []).append((number, [leaf.grad for leaf in tree]))
        return back

    def weight_gradients(self, microbatch: int) -> None:
        """What an I left to do."""
        self.at_work = self.name
        add_weight_gradients(self.owed.pop(microbatch, []))

    def _run(self, this: Pass, *, grad: bool, again: bool) -> Graph:
        reads: dict[tuple[int, Value], list[torch.Tensor]] = {}
        written: dict[Value, Any] = {}
        is_last = again or not this.recompute  # of the forwards of this micro-batch
        catch = CatchWeights() if this.in_halves and grad and is_last else nullcontext()
        watch = self.statistics.watch(this.microbatch, again=again)
        with this.ambient.again(grad=grad), catch as caught, watch:
            for number in self.numbers:
                self._run_layer(number, this, reads, written)
            loss = self._loss(this, written) if this.target else None
        # the tensors as they are now: a layer may still change the dict or list that it returned
        writes = {value: pytree.tree_map(_itself, written[value]) for value in self.sent}
        return Graph(reads, writes, loss, caught.calls if caught else [])

    def _loss(self, this: Pass, written: dict[Value, Any]) -> torch.Tensor:
        assert this.target is not None  # this is the last stage
        self.at_work = LOSS
        with drawing(layer_seed(this.seed, this.step, this.microbatch, LOSS)):
            return this.target.loss(written[self.layers.output])

    def _run_layer(
        self,
        number: int,
        this: Pass,
        reads: dict[tuple[int, Value], list[torch.Tensor]],
        written: dict[Value, Any],
    ) -> None:
        layer, sources = self.layers.layers[number], self.layers.sources[number]
        self.at_work = layer.name
        given = {value: written[value] for value in sources if value in written}
        for value in sources:
            if value not in written:
                tree = pytree.tree_map(_leaf, this.values[value])
                reads[number, value] = _tensors(tree)
                # an operation in place must not change what others, or a recomputation, read
                enter = _copy if number in self.in_place else _itself
                given[value] = pytree.tree_map(enter, tree)
        seed = layer_seed(this.seed, this.step, this.microbatch, layer.name)
        with drawing(seed) if number in self.random else nullcontext():
            arguments = tuple(given[value] for value in sources)
            if doubles := self.tied.by_layer.get(number):
                result = functional_call(layer.module, doubles, arguments)
            else:
                result = layer.module(*arguments)
        results = result if len(layer.writes) > 1 else (result,)
        written |= {Value(number, n): r for n, r in zip(layer.writes, results, strict=True)}


def may_write_in_place(module: nn.Module) -> bool:
    """False only for modules of torch.nn that are not told to work in place."""
    return any(
        getattr(part, "inplace", False) or not is_of_torch(part) for part in module.modules()
    )


def _leaf(item: Any) -> Any:
    """The same tensor at the edge of a graph of its own; what is no tensor, as it is."""
    if isinstance(item, torch.Tensor):
        return item.detach().requires_grad_(item.requires_grad)
    if item is not None and not isinstance(item, PLAIN):
        raise ModelError(
            f"a {type(item).__name__} passes between stages, but tensors in it would not be seen: "
            "pass tensors, numbers, text, and tuples, lists and dicts of them"
        )
    return item


def _copy(item: Any) -> Any:
    return item.clone() if isinstance(item, torch.Tensor) else item


def _itself(item: Any) -> Any:
    """For a tree of the same things in containers of its own."""
    return item


def _nothing(_: Any) -> torch.Tensor:
    """In place of a tensor that is saved for a backward that will not come."""
    return NOTHING


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
