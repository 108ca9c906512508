"""One stage: run its layers forward and backward, and keep what is needed in between."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from stageline.model import trees
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.exactness.batch_norm import RunningStatistics
from stageline.runtime.exactness.gradient_types import EXACT, FUSED
from stageline.runtime.exactness.in_place import InPlaceChanges
from stageline.runtime.exactness.inner_gradients import InnerGradients, add_forward_gradients
from stageline.runtime.exactness.layer_state import LayerState, restored
from stageline.runtime.exactness.randomness.seeded_draws import Draws, SeededDraws
from stageline.runtime.exactness.randomness.watched_draws import WatchedDraws
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.exactness.weight_aliases import UnchangedWeights
from stageline.runtime.optimizers.weight_versions import Versions
from stageline.runtime.stage import autograd
from stageline.runtime.stage.embedding_gradients import LargeTables
from stageline.runtime.stage.forward_pass import ForwardPass, may_repeat, run_forward
from stageline.runtime.stage.kept_results import KeptMemory
from stageline.runtime.stage.offload import Offloader
from stageline.runtime.stage.recomputation import Recomputation, check_inputs
from stageline.runtime.stage.split_backward import HookGradients, add_weight_gradients
from stageline.runtime.stage.stage_border import gradients_by_value
from stageline.runtime.stage.stage_layers import layers_of_stage, other_readers, reads_of
from stageline.runtime.stage.stage_values import (
    ForwardArgs,
    ForwardResult,
    Gradients,
    InFlight,
    StageGraph,
)
from stageline.runtime.stage.weight_calls import WeightCall
from stageline.torch_private import is_compiled, storage_identity
from stageline.torch_private_training import is_sharded_module

NO_CONTEXT = nullcontext()


class Stage:
    """A run of consecutive layers on one rank.

    State: which layer runs, what was observed of the layers, and BatchNorm's statistics.
    """

    def __init__(
        self,
        layers: LayerSequence,
        numbers: range,
        sent: Iterable[Value],
        tied: TiedWeights,
        batch_norm: str,
        accumulate: str | torch.dtype = EXACT,
        device: torch.device | None = None,
        accelerator: Accelerator | None = None,
        host_memory: Offloader | None = None,
        *,
        uses_threads: bool = False,
        embedding_rows: bool = True,
    ) -> None:
        self.layers, self.numbers, self.tied = layers, numbers, tied
        self.accelerator, self.host_memory = accelerator, host_memory
        self.sent = tuple(sorted(sent))
        self.output = layers.output
        self.has_output = self.output.writer in numbers
        self.reads = reads_of(layers, numbers)
        self.stage_layers = layers_of_stage(layers, numbers, tied, {*self.sent, layers.output})
        modules = {layer.number: layer.module for layer in self.stage_layers}
        self.is_fused = accumulate == FUSED
        self.is_opaque = any(map(_hides_its_weights, modules.values()))
        self.tables = LargeTables(modules if embedding_rows and not self.is_opaque else {})
        names = [layer.name for layer in self.stage_layers]
        self.name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self.statistics = RunningStatistics.of(modules.values(), batch_norm)
        self.in_place = self._in_place_changes()
        self.inner_gradients = InnerGradients(modules)
        kind = WatchedDraws if uses_threads else SeededDraws
        self.draws: Draws = kind(modules.values(), device, layers.shared_modules)
        self.layer_state = LayerState(modules.values(), has_norms=batch_norm == "microbatch")
        self.recomputation = Recomputation()
        self.kept_memory = KeptMemory()
        self.versions: Versions | None = None  # of its weights, if several are in use at a time
        self.unchanged_weights: UnchangedWeights | None = None  # during a step
        self.running_layer = ""  # its name, for errors

    @property
    def buffer_memory(self) -> set[int]:
        """Return the identity of the memory of buffers, which a later micro-batch may change."""
        modules = (layer.module for layer in self.stage_layers)
        return {storage_identity(buffer) for module in modules for buffer in module.buffers()}

    def _in_place_changes(self) -> InPlaceChanges:
        others = other_readers(self.layers, self.numbers)
        shared = [v for v in self.reads if v.writer == INPUT or others[v]]
        later = [v for v in self.reads if any(n >= self.numbers.stop for n in others[v])]
        return InPlaceChanges([layer.module for layer in self.stage_layers], shared, later)

    def forward(self, args: ForwardArgs, in_flight: InFlight) -> ForwardResult:
        """Run the layers, and keep what the backward needs."""
        kept, state = None, self.layer_state
        with state.exclusive_generators():
            before = state.snapshot() if may_repeat(self, args) else None
            if before and args.recompute:
                kept = self.recomputation.keep(args, before)
            graph = run_forward(self, args, before)
            if kept:
                again = kept.args._replace(results=graph.results)
                kept = kept._replace(args=again, state=state.changed_since(kept.state))
            elif before and (state.changing is None or self.inner_gradients.is_observing):
                state.learn(before)
        if graph.forward_gradients:
            in_flight.forward_gradients[args.microbatch] = graph.forward_gradients
        if kept:
            self.recomputation.check_target(args, kept)
            in_flight.recomputations[args.microbatch] = kept
        else:
            in_flight.graphs[args.microbatch] = graph
        written = {v: trees.map_leaves(trees.as_graph_leaf, t) for v, t in graph.writes.items()}
        loss = None if graph.loss is None else graph.loss.detach()
        return ForwardResult(written, graph.marks, loss)

    def run_only(self, args: ForwardArgs) -> ForwardResult:
        """Run the layers without a backward to follow; what is written includes the output."""
        with self.layer_state.exclusive_generators():
            graph = ForwardPass(self, args, grad=False, again=False).run()
        return ForwardResult(graph.writes, graph.marks, None)

    def fetch(self, microbatch: int, in_flight: InFlight) -> None:
        """Start to copy saved tensors back from host memory, ahead of their use."""
        graph = in_flight.graphs.get(microbatch)
        if graph and graph.offloaded:
            graph.offloaded.fetch()

    def prepare_backward(self, microbatch: int, in_flight: InFlight) -> None:
        """Recompute the forward; this need not wait for the gradient to arrive."""
        kept = in_flight.recomputations.pop(microbatch)
        self.running_layer = self.name
        check_inputs(kept)
        with self.layer_state.exclusive_generators(), restored(kept.state):
            is_needed = may_repeat(self, kept.args, again=True)
            before = self.layer_state.snapshot() if is_needed else None
            in_flight.graphs[microbatch] = run_forward(self, kept.args, before, again=True)

    def backward(
        self, microbatch: int, gradients: Gradients, in_flight: InFlight, *, in_halves: bool
    ) -> Gradients:
        """Return the gradients of the values that were read.

        Weights get theirs too, except those of intercepted calls if the backward is `in_halves`.
        """
        graph = in_flight.graphs.pop(microbatch)
        self.running_layer = self.name
        roots, seeds = self._roots(graph, gradients)
        graph.inputs.store.is_expected = True
        with self._gathering(graph.version):
            if in_flight.forward_gradients:
                add_forward_gradients(in_flight.forward_gradients.pop(microbatch, []))
            if roots:
                with self._observed_hooks(graph.calls, in_halves=in_halves):
                    autograd.backward(roots, seeds)
            if in_halves:
                in_flight.deferred[microbatch] = graph.calls, graph.version
            elif graph.calls:
                add_weight_gradients(graph.calls, fused=self.is_fused)
            self._handle_weight_hooks(microbatch)
        return gradients_by_value(graph.reads, graph.inputs.take_gradients())

    def _roots(
        self, graph: StageGraph, gradients: Gradients
    ) -> tuple[list[autograd.Root], list[Tensor]]:
        """Return where the backward starts, and the gradients that it starts with.

        Autograd takes these before any other gradient: for a value that this stage and later ones
        read, the gradient of the later ones is the first term of the sum.
        """
        roots: list[autograd.Root] = []
        seeds = []
        for value, tree in graph.writes.items():
            for tensor, seed in zip(trees.tensors(tree), gradients.get(value, ()), strict=False):
                if tensor.requires_grad and seed is not None:
                    roots.append(autograd.root(tensor, seed))
                    seeds.append(seed)
        position = 0
        for value, tensors in graph.reads.items() if graph.inputs.edges else ():
            for number, seed in enumerate(gradients.get(value, ())):
                if seed is not None and position + number in graph.inputs.edges:
                    roots.append(graph.inputs.edges[position + number])
                    seeds.append(seed)
            position += len(tensors)
        if graph.loss is not None and graph.target is not None:
            seeds.append(graph.target.loss_gradient(graph.loss))
            roots.append(autograd.root(graph.loss, seeds[-1]))
        return roots, seeds

    def weight_gradients(self, microbatch: int, in_flight: InFlight) -> None:
        """Compute the gradients of weights that an I has deferred."""
        self.running_layer = self.name
        calls, version = in_flight.deferred.pop(microbatch)
        with self._gathering(version):
            add_weight_gradients(calls, fused=self.is_fused)
            self._handle_weight_hooks(microbatch)

    def is_intercepted(self, layer: int, step: int) -> bool:
        """Return whether gradients of a layer's weights may be deferred or fused in a step."""
        return not self.is_opaque and self.inner_gradients.is_intercepted(layer, step)

    def keep_versions(self, depth: int) -> None:
        """Keep versions of the weights from now on.

        They are needed if older ones stay in use (`depth` of them), or if layers share weights.
        """
        versions = Versions({layer.number: layer.module for layer in self.stage_layers})
        has_ties = any(layer.aliases for layer in self.stage_layers)
        self.versions = versions if versions.parameters and (depth or has_ties) else None

    def gather_gradients(self) -> None:
        """Bring the gradients of a whole mini-batch to the weights, if versions gathered them."""
        if self.versions is not None:
            self.versions.hand_over()

    def _gathering(self, version: int) -> AbstractContextManager[None]:
        return NO_CONTEXT if self.versions is None else self.versions.gathering(version)

    def _handle_weight_hooks(self, microbatch: int) -> None:
        """Store gradients of tied weights with hooks; check that no hook changed a weight."""
        self.tied.store_hooked_gradients(self.numbers, microbatch)
        if self.unchanged_weights is not None:
            self.unchanged_weights.check()

    def _observed_hooks(
        self, calls: list[WeightCall], *, in_halves: bool
    ) -> AbstractContextManager[HookGradients | None]:
        """Observe hooks that take gradients during the backward, where calls are intercepted."""
        may_intercept = (in_halves or self.is_fused) and not self.is_opaque
        return HookGradients(self.inner_gradients, calls) if may_intercept else NO_CONTEXT


def _hides_its_weights(module: nn.Module) -> bool:
    """Return whether functions cannot be intercepted.

    Those of compiled modules are not called, and those of sharded ones get weights that are
    released at the end of the backward that brings gradients to inputs.
    """
    return is_compiled(module) or any(map(is_sharded_module, module.modules()))
