"""One stage at work: its layers forward and backward, and what waits in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.func import functional_call

from stageline.errors import ModelError
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.runtime import trees
from stageline.runtime.devices import moved
from stageline.runtime.engine import autograd as engine
from stageline.runtime.engine.offload import HostMemory, Parking
from stageline.runtime.engine.split_backward import (
    CatchWeights,
    Caught,
    InBackward,
    add_weight_gradients,
)
from stageline.runtime.engine.stage_border import Entry, gradients_by_value
from stageline.runtime.exactness.batch_norm import Statistics
from stageline.runtime.exactness.caller_context import Ambient
from stageline.runtime.exactness.in_place import (
    NO_MARKS,
    Entering,
    InPlace,
    Mark,
    Marks,
    version_of,
)
from stageline.runtime.exactness.inner_gradients import (
    NO_SAVED_TENSORS,
    Filled,
    Inner,
    RepeatForward,
    add_filled,
    filled_apart,
    filled_never,
)
from stageline.runtime.exactness.layer_state import Before, LayerState, as_it_was
from stageline.runtime.exactness.randomness import Key, Silent, drawing
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.exactness.weight_aliases import Unchanged
from stageline.runtime.optimizers.weight_versions import Versions

NOTHING = torch.empty(0)
LOSS = "loss_fn"  # in the place of a layer's name
LOSS_NUMBER = -1  # in the place of its number
Values = Mapping[Value, Any]
Gradients = dict[Value, list[Tensor | None]]  # of each value, those of its tensors


@dataclass(frozen=True)
class Target:
    """What the last stage compares its output with, and how much this micro-batch counts."""

    loss_fn: Callable[[Any, Any], Tensor]
    target: Any
    weight: float

    def loss(self, output: Any, device: torch.device | None = None) -> Tensor:
        loss = self.loss_fn(output, moved(self.target, device))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is {loss!r}"
            raise ModelError(
                f"the loss {found}, but has to be one number: the mean over the samples, or their "
                "sum if there is a count_fn"
            )
        return loss


class Pass(NamedTuple):
    """All that the forward of a micro-batch depends on, to run it once or once again."""

    microbatch: int
    values: Values  # what the stage reads
    target: Target | None  # on the last stage, if the loss is known here
    seed: int
    step: int
    first: int  # of the micro-batches of all replicas, the number of the first one here
    ambient: Ambient
    in_halves: bool = False  # the backward comes as I and W
    recompute: bool = False  # keep only what is read, and run forward again before the backward
    offload: bool = False  # what is kept waits in host memory
    version: int = 0  # of the weights, if several are in use
    marks: Marks = NO_MARKS  # of what is read: whose memory it is


class Forwarded(NamedTuple):
    """What a forward gives to others."""

    written: dict[Value, Any]  # that later stages read
    marks: Marks
    loss: Tensor | None


class Kept(NamedTuple):
    """What a recomputation begins with, and the versions that its tensors had."""

    again: Pass
    versions: list[int]
    target_versions: list[int]
    state: Before  # of its layers, as far as the first run moved it


class Graph(NamedTuple):
    """What a forward leaves behind for its backward."""

    entry: Entry
    reads: dict[Value, list[Tensor]]  # the tensors that entered, which stay as long as the graph
    writes: dict[Value, Any]  # values that later stages read
    loss: Tensor | None
    weight: float  # what the loss counts for
    marks: Marks  # of what is written
    calls: list[Caught]  # that use weights, if these were caught
    parking: Parking | None
    version: int = 0  # of the weights that were used
    filled: Filled | None = None  # gradients that the forward itself brought to weights


@dataclass
class Waiting:
    """What one stage holds during one step, by micro-batch."""

    passes: dict[int, Kept] = field(default_factory=dict)  # from a forward to its recomputation
    graphs: dict[int, Graph] = field(default_factory=dict)  # from a forward to its backward
    owed: dict[int, tuple[list[Caught], int]] = field(default_factory=dict)  # from an I to its W
    filled: dict[int, Filled] = field(default_factory=dict)  # from a forward to its backward


class Bound(NamedTuple):
    """A layer in its stage: all that is known before any data comes."""

    number: int
    layer: Layer
    sources: tuple[Value, ...]
    writes: tuple[Value, ...]
    last_uses: tuple[Value, ...]  # of the stage's own values, that nobody reads after it
    doubles: dict[str, Tensor] | None  # of weights that other layers use as well


class Stage:
    """A run of layers. State: which layer runs, what was seen of them, BatchNorm's statistics."""

    def __init__(
        self,
        layers: LayerSequence,
        numbers: range,
        sent: Iterable[Value],
        tied: TiedWeights,
        batch_norm: str,
        accumulate: str = "exact",
        device: torch.device | None = None,
        host_memory: HostMemory | None = None,
    ) -> None:
        self.layers, self.numbers, self.tied = layers, numbers, tied
        self.device, self.host_memory = device, host_memory
        self.sent = tuple(sorted(sent))
        self.has_output = layers.output.writer in numbers
        self.reads = reads_of(layers, numbers)
        last_uses = _last_uses(layers, numbers, {*self.sent, layers.output})
        self.bound = [_bound(layers, number, tied, last_uses[number]) for number in numbers]
        modules = [layers.layers[number].module for number in numbers]
        self.is_fused = accumulate == "fused"
        self.is_compiled = any(map(_is_compiled, modules))  # its functions cannot be caught
        names = [layers.layers[number].name for number in numbers]
        self.name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self.statistics = Statistics.of(modules, batch_norm)
        others = other_readers(layers, numbers)
        shared = [v for v in self.reads if v.writer == INPUT or others[v]]
        later = [v for v in self.reads if any(number >= numbers.stop for number in others[v])]
        self.in_place = InPlace(modules, shared, later)
        self.inner = Inner(
            {number: layers.layers[number].module for number in numbers},
            untracked=self.statistics.modules if batch_norm == "minibatch" else (),
        )
        self.silent = Silent(modules, trusts=device is None or device.type == "cpu")
        self.silent_losses: set[object] = set()  # functions that were watched and drew nothing
        self.state = LayerState(modules)
        self.gentle_losses: set[object] = set()  # functions that were seen to leave targets alone
        self.versions: Versions | None = None  # of its weights, if several are in use at a time
        self.unchanged: Unchanged | None = None  # weights that nobody may change during a step
        self.at_work = ""  # the name of the layer that runs, for errors

    def forward(self, this: Pass, waiting: Waiting) -> Forwarded:
        """Run the layers, and keep what the backward needs."""
        with self.state.turn():
            kept = self._kept(this) if this.recompute else None
            graph = self._run(this, grad=True, again=False)
            if kept:
                kept = kept._replace(state=self.state.moved_since(kept.state))
        if graph.filled:
            waiting.filled[this.microbatch] = graph.filled
        if kept:
            self._look_at_target(this, kept)
            waiting.passes[this.microbatch] = kept
        else:
            waiting.graphs[this.microbatch] = graph
        written = {v: trees.map_leaves(trees.at_the_edge, t) for v, t in graph.writes.items()}
        return Forwarded(written, graph.marks, None if graph.loss is None else graph.loss.detach())

    def _kept(self, this: Pass) -> Kept:
        """A loss may change its target, as a layer its inputs: the second run needs the first's."""
        target, versions = this.target, list[int]()
        if target is not None:
            versions = _versions([target.target])
            if target.loss_fn not in self.gentle_losses:
                target = replace(target, target=trees.map_leaves(trees.copied, target.target))
        again, state = this._replace(target=target), self.state.before()
        return Kept(again, _versions(this.values.values()), versions, state)

    def _look_at_target(self, this: Pass, kept: Kept) -> None:
        """Remember a loss that leaves its target alone: it is not copied again."""
        if this.target is None:
            return
        if _versions([this.target.target]) == kept.target_versions:
            self.gentle_losses.add(this.target.loss_fn)
        elif kept.again.target is this.target:
            self.gentle_losses.discard(this.target.loss_fn)
            raise ModelError(
                "the loss changed its target in place, but not when it first ran, and it is to be "
                "computed again from it: run the step again, or let it change a clone"
            )

    def run_only(self, this: Pass) -> Forwarded:
        """Run the layers without a backward to follow; what is written has the output too."""
        with self.state.turn():
            graph = self._run(this, grad=False, again=False)
        return Forwarded(graph.writes, graph.marks, None)

    def fetch(self, microbatch: int, waiting: Waiting) -> None:
        """Bring back what waits in host memory, ahead of its use."""
        graph = waiting.graphs.get(microbatch)
        if graph and graph.parking:
            graph.parking.fetch()

    def prepare_backward(self, microbatch: int, waiting: Waiting) -> None:
        """Recompute what was not kept; this need not wait for the gradient to arrive."""
        kept = waiting.passes.pop(microbatch)
        if _versions(kept.again.values.values()) != kept.versions:
            self.at_work = self.name
            raise ModelError(
                "an input was changed in place between its forward and its backward, but the "
                "forward is to be recomputed from it: change a clone, or after the backward"
            )
        with self.state.turn(), as_it_was(kept.state):
            waiting.graphs[microbatch] = self._run(kept.again, grad=True, again=True)

    def backward(
        self, microbatch: int, gradients: Gradients, waiting: Waiting, *, in_halves: bool
    ) -> Gradients:
        """Take gradients back to what was read, and to the weights whose use was not caught."""
        graph = waiting.graphs.pop(microbatch)
        self.at_work = self.name
        roots, seeds = self._roots(graph, gradients)
        graph.entry.inbox.is_awaited = True
        with self._gathering(graph.version):
            add_filled(waiting.filled.pop(microbatch, []))
            if roots:
                with self._watched_hooks(graph.calls, in_halves=in_halves):
                    engine.backward(roots, seeds)
            if in_halves:
                waiting.owed[microbatch] = graph.calls, graph.version
            elif graph.calls:
                add_weight_gradients(graph.calls, fused=self.is_fused)
            self._look_at_hooks(microbatch)
        counts = {value: len(tensors) for value, tensors in graph.reads.items()}
        return gradients_by_value(counts, graph.entry.gradients())

    def _roots(self, graph: Graph, gradients: Gradients) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return where the backward starts, and the gradients that it starts with there.

        Autograd takes these in before any other gradient: a value that this stage reads as later
        ones do has their gradient as the first term of its sum.
        """
        roots: list[GradientEdge] = []
        seeds = []
        arrived = {value: moved(found, self.device) for value, found in gradients.items()}
        for value, tree in graph.writes.items():
            for tensor, seed in zip(trees.tensors(tree), arrived.get(value, ()), strict=False):
                if tensor.requires_grad and seed is not None:
                    roots.append(engine.root(tensor, seed))
                    seeds.append(seed)
        position = 0
        for value, tensors in graph.reads.items():
            for number, seed in enumerate(arrived.get(value, ())):
                if seed is not None and position + number in graph.entry.edges:
                    roots.append(graph.entry.edges[position + number])
                    seeds.append(seed)
            position += len(tensors)
        if graph.loss is not None:
            seeds.append(torch.full_like(graph.loss, graph.weight))
            roots.append(engine.root(graph.loss, seeds[-1]))
        return roots, seeds

    def weight_gradients(self, microbatch: int, waiting: Waiting) -> None:
        """What an I left to do."""
        self.at_work = self.name
        calls, version = waiting.owed.pop(microbatch)
        with self._gathering(version):
            add_weight_gradients(calls, fused=self.is_fused)
            self._look_at_hooks(microbatch)

    def is_caught(self, layer: int, step: int) -> bool:
        """Whether gradients of a layer's weights may wait, or be fused."""
        return not self.is_compiled and self.inner.is_caught(layer, step)

    def keep_versions(self, depth: int) -> None:
        """Of its weights, from now on, if older ones stay in use or layers share weights."""
        modules = {bound.number: bound.layer.module for bound in self.bound}
        versions = Versions(modules)
        has_ties = any(bound.doubles for bound in self.bound)
        self.versions = versions if versions.parameters and (depth or has_ties) else None

    def gather_gradients(self) -> None:
        """All gradients of a mini-batch are there: if they gathered elsewhere, to the weights."""
        if self.versions is not None:
            self.versions.hand_over()

    def _gathering(self, version: int) -> AbstractContextManager[None]:
        return nullcontext() if self.versions is None else self.versions.gathering(version)

    def _look_at_hooks(self, microbatch: int) -> None:
        """After a backward: of weights that have hooks, or have been changed by one."""
        self.tied.put_aside(self.numbers, microbatch)
        if self.unchanged is not None:
            self.unchanged.check()

    def _watched_hooks(
        self, calls: list[Caught], *, in_halves: bool
    ) -> AbstractContextManager[InBackward | None]:
        """Around a backward: hooks may take gradients as well."""
        may_catch = (in_halves or self.is_fused) and not self.is_compiled
        return InBackward(self.inner, calls) if may_catch else nullcontext()

    def _run(self, this: Pass, *, grad: bool, again: bool) -> Graph:
        """Run forward, and again if it turns out that the stage has to run in another way."""
        may_repeat = this.in_halves or self.is_fused or this.recompute or this.offload
        state = self.inner.state() if grad and may_repeat else None
        try:
            graph = self._run_once(this, grad=grad, again=again)
            if state is not None and self.inner.is_watching:
                self.inner.moving |= state.moved
            return graph
        except RepeatForward:
            pass
        except RuntimeError as error:
            if state is None or self.inner.differentiates or NO_SAVED_TENSORS not in str(error):
                raise
            self.inner.differentiates = True
        assert state is not None  # something was caught or dropped
        state.restore(self.at_work)
        self.statistics.forget(this.step, this.microbatch)
        return self._run(this, grad=grad, again=again)

    def _run_once(self, this: Pass, *, grad: bool, again: bool) -> Graph:
        loss_fn = this.target.loss_fn if this.target else None
        watches = grad and not self.is_compiled and self.inner.watches(this.step, loss_fn)
        is_kept = grad and (again or not this.recompute)
        catch = self._catch(this, is_kept=is_kept, watches=watches)
        saves = watches or self.inner.differentiates  # what its graph saves may be needed at once
        parking = Parking(self.host_memory) if this.offload and self.host_memory else None
        entry, values = Entry(), dict[Value, Any]()
        weights = self.versions.of(this.version) if self.versions and grad else {}
        with ExitStack() as around:
            this.ambient.enter(around, grad=grad)
            entering = self._enter(this, entry, values, is_kept=this.recompute and not again)
            around.enter_context(self.inner.turn(loss_fn))
            if grad and not is_kept and not saves:
                # torch takes other kernels, with other bits, where no graph is recorded; so one is,
                # and what it would save for the backward is dropped at once
                around.enter_context(saved_tensors_hooks(_nothing, self.inner.lacks))
            elif parking and grad and not saves:
                around.enter_context(saved_tensors_hooks(parking.put, parking.take))
            # outside of what sees functions: there each look at a tensor is one
            filled = around.enter_context(self._filled(weights, loss_fn, grad=grad))
            around.enter_context(catch or nullcontext())
            if self.statistics.modules:
                around.enter_context(self.statistics.watch(this.step, this.microbatch, again=again))
            self._run_layers(this, values, entering, weights, catch)
            loss = self._loss(this, values) if this.target else None
            if not self.in_place.is_gentle:
                self.in_place.note(entering)
        if filled:
            self.inner.fill()
        writes = self._written(this, values)
        sent = [(v, i, t) for v, tree in writes.items() for i, t in enumerate(trees.tensors(tree))]
        return Graph(
            entry,
            {value: trees.tensors(this.values[value]) for value in self.reads},
            writes,
            loss,
            this.target.weight if this.target else 0.0,
            self.in_place.leaving(sent, entering),
            catch.calls if catch else [],
            parking,
            this.version,
            filled,
        )

    def _run_layers(
        self,
        this: Pass,
        values: dict[Value, Any],
        entering: list[Entering],
        weights: Mapping[int, dict[str, Tensor]],
        catch: CatchWeights | None,
    ) -> None:
        for bound in self.bound:
            if catch:
                catch.layer = bound.number
            self._run_layer(bound, this, values, weights.get(bound.number, bound.doubles))
            if not self.in_place.is_gentle:
                self.in_place.look(bound.layer.name, entering)
            for value in bound.last_uses:
                del values[value]
        if catch:
            catch.layer = LOSS_NUMBER

    def _written(self, this: Pass, values: dict[Value, Any]) -> dict[Value, Any]:
        """Return what others read, and the output if there is no loss to take it.

        With the tensors as they are now: a layer may still change a dict or list that it returned.
        """
        kept = self.sent
        if self.has_output and not this.target and self.layers.output not in kept:
            kept = (*kept, self.layers.output)
        return {value: trees.map_leaves(trees.itself, values[value]) for value in kept}

    def _catch(self, this: Pass, *, is_kept: bool, watches: bool) -> CatchWeights | None:
        """What sees the functions of a forward, if they are of interest."""
        catches = is_kept and not self.is_compiled and (this.in_halves or self.is_fused)
        if not (catches or watches):
            return None
        return CatchWeights(self.inner, catches=catches, watches=watches)

    def _filled(
        self,
        versions: Mapping[int, Mapping[str, Tensor]] | None,
        loss_fn: Callable[..., Any] | None,
        *,
        grad: bool,
    ) -> AbstractContextManager[Filled]:
        """Around a forward, for gradients that a backward inside it brings to weights."""
        if not grad or self.inner.is_trusted(loss_fn):
            return nullcontext([])
        doubles = versions.values() if versions else [bound.doubles or {} for bound in self.bound]
        weights = self.inner.weights(doubles)
        if self.inner.keeps_apart and not self.is_compiled:
            return filled_apart(weights)
        return filled_never(weights, self.name)

    def _enter(
        self, this: Pass, entry: Entry, values: dict[Value, Any], *, is_kept: bool
    ) -> list[Entering]:
        """Bring what the stage reads into a graph of its own; `is_kept`: to be run once more."""
        entering: list[Entering] = []
        for value in self.reads:
            brought = moved(this.values[value], self.device)
            for position, tensor in enumerate(trees.tensors(brought)):
                mark = this.marks.get((value, position), Mark.NONE)
                entering.append(self.in_place.entering(value, tensor, mark, is_kept=is_kept))
            values[value] = brought
        entered = iter(entry.enter([item.given for item in entering]))

        def within(leaf: Any) -> Any:
            return next(entered) if isinstance(leaf, Tensor) else trees.at_the_edge(leaf)

        for value in self.reads:
            values[value] = trees.map_leaves(within, values[value])
        return entering

    def _run_layer(
        self,
        bound: Bound,
        this: Pass,
        values: dict[Value, Any],
        doubles: dict[str, Tensor] | None,
    ) -> None:
        name, module = bound.layer.name, bound.layer.module
        self.at_work = name
        given = [values[value] for value in bound.sources]
        if self.silent.is_silent(module):
            result = _call(module, doubles, given)
        else:
            with drawing(Key(this.seed, this.step, this.first + this.microbatch, name)) as watched:
                result = _call(module, doubles, given)
            self.silent.note(module, drew=watched.drew)
        values.update(zip(bound.writes, bound.layer.written(result), strict=True))

    def _loss(self, this: Pass, written: dict[Value, Any]) -> Tensor:
        assert this.target is not None  # this is the last stage
        self.at_work = LOSS
        output = written[self.layers.output]
        if self.silent.trusts and this.target.loss_fn in self.silent_losses:
            return this.target.loss(output, self.device)
        with drawing(Key(this.seed, this.step, this.first + this.microbatch, LOSS)) as watched:
            loss = this.target.loss(output, self.device)
        if not watched.drew:
            self.silent_losses.add(this.target.loss_fn)
        return loss


def _versions(values: Iterable[Any]) -> list[int]:
    return [version_of(tensor) for tree in values for tensor in trees.tensors(tree)]


def reads_of(layers: LayerSequence, stage: range) -> tuple[Value, ...]:
    """Return the values that a stage reads from the loader or from other stages."""
    read = (value for number in stage for value in layers.sources[number])
    return tuple(dict.fromkeys(value for value in read if value.writer not in stage))


def other_readers(layers: LayerSequence, stage: range) -> dict[Value, list[int]]:
    """Return for each value that a stage reads the layers outside of it that read it as well."""
    found: dict[Value, list[int]] = {value: [] for value in reads_of(layers, stage)}
    for number, sources in enumerate(layers.sources):
        if number not in stage:
            for value in sources:
                if value in found:
                    found[value].append(number)
    return found


def _last_uses(
    layers: LayerSequence, stage: range, kept: set[Value]
) -> dict[int, tuple[Value, ...]]:
    """By layer: the values of this stage that nobody reads after it."""
    last: dict[Value, int] = {}
    for number in stage:
        last |= {value: number for value in layers.sources[number] if value.writer in stage}
        last |= {Value(number, name): number for name in layers.layers[number].writes}
    by_layer: dict[int, list[Value]] = {number: [] for number in stage}
    for value, number in last.items():
        if value not in kept:
            by_layer[number].append(value)
    return {number: tuple(values) for number, values in by_layer.items()}


def _bound(
    layers: LayerSequence,
    number: int,
    tied: TiedWeights,
    last_uses: tuple[Value, ...],
) -> Bound:
    layer, sources = layers.layers[number], layers.sources[number]
    return Bound(
        number,
        layer,
        sources,
        tuple(Value(number, name) for name in layer.writes),
        last_uses,
        tied.by_layer.get(number),
    )


def _call(module: nn.Module, doubles: dict[str, Tensor] | None, given: list[Any]) -> Any:
    return functional_call(module, doubles, tuple(given)) if doubles else module(*given)


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)` or `module.compile()`, as a whole or in part."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def _nothing(_: Any) -> Tensor:
    """In place of a tensor that is saved for a backward that will not come."""
    return NOTHING
