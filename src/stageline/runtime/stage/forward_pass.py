"""Run the layers of a stage forward on one micro-batch, and record the graph for the backward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stageline.model import trees
from stageline.model.layers import INPUT, Value
from stageline.model.named_places import replaced_parameters
from stageline.runtime.accelerators.carry import brought
from stageline.runtime.accelerators.code_places import runs_user_code
from stageline.runtime.exactness.in_place import StageInput
from stageline.runtime.exactness.inner_gradients import (
    FORWARD_MODE_LOCK,
    NO_SAVED_TENSORS,
    ForwardGradients,
    RefusedGradients,
    RepeatForward,
    collected_gradients,
)
from stageline.runtime.exactness.layer_state import StateSnapshot
from stageline.runtime.exactness.randomness.seeded_draws import RandomKey
from stageline.runtime.stage.forward_kind import ForwardKind, RunningForward
from stageline.runtime.stage.kept_results import KeepingMode, KeptResults, TakingMode
from stageline.runtime.stage.offload import OffloadedTensors
from stageline.runtime.stage.stage_border import GraphInputs
from stageline.runtime.stage.stage_layers import StageLayer
from stageline.runtime.stage.stage_values import ForwardArgs, StageGraph
from stageline.runtime.stage.weight_calls import WeightCallInterceptor
from stageline.torch_private_training import skipped_by_compiler

if TYPE_CHECKING:
    from stageline.runtime.stage.stage import Stage

LOSS = "loss_fn"  # in the place of a layer's name
LOSS_NUMBER = -1  # in the place of a layer's number
EMPTY = torch.empty(0)
NOTHING = nullcontext()


def may_repeat(stage: Stage, args: ForwardArgs, *, again: bool = False) -> bool:
    """Return whether calls are intercepted or saved tensors dropped or moved in a forward.

    This may turn out to be wrong for its layers. `again`: it is a recomputation, which drops none.
    """
    is_dropped = args.recompute and not again
    is_moved = args.offload and stage.host_memory is not None
    return args.in_halves or stage.is_fused or is_moved or is_dropped


def run_forward(
    stage: Stage, args: ForwardArgs, before: StateSnapshot | None, *, again: bool = False
) -> StageGraph:
    """Run a stage forward, and once more if it turns out that it has to run in another way.

    `before` is the state of its layers, if the forward may have to be repeated. `again`: this is a
    recomputation.
    """
    inner = stage.inner_gradients
    try:
        return ForwardPass(stage, args, grad=True, again=again).run()
    except RepeatForward:
        pass
    except RuntimeError as error:
        if before is None or inner.differentiates or NO_SAVED_TENSORS not in str(error):
            raise
        inner.differentiates = True
    assert before is not None  # something was intercepted or dropped
    stage.layer_state.undo(before, stage.running_layer)
    stage.statistics.forget(args.step, args.microbatch)
    return run_forward(stage, args, before, again=again)


class ForwardPass:
    """One forward of one micro-batch. State: the values that layers have written so far."""

    def __init__(self, stage: Stage, args: ForwardArgs, *, grad: bool, again: bool) -> None:
        self.stage, self.args, self.grad, self.again = stage, args, grad, again
        self.loss_fn = args.target.loss_fn if args.target else None
        self.keeps_graph = grad and (again or not args.recompute)
        inner = stage.inner_gradients
        observes = grad and not stage.is_opaque and inner.observes(args.step, self.loss_fn)
        self.interceptor = self._interceptor(observes=observes)
        self.needs_saved_tensors = observes or inner.differentiates  # maybe within the forward
        memory = stage.host_memory if args.offload else None
        kept = (stage.buffer_memory, stage.statistics.scratch) if memory else ()
        self.offloaded = OffloadedTensors(memory, *kept) if memory else None
        self.graph_inputs = GraphInputs()
        self.kept = KeptResults() if self._keeps_results else None
        self.refused: RefusedGradients | None = None
        self.reads: dict[Value, list[Tensor]] = {}
        self.values: dict[Value, Any] = {}

    def run(self) -> StageGraph:
        """Run all layers, and the loss on the last stage."""
        stage, args = self.stage, self.args
        weights = stage.versions.of(args.version) if stage.versions and self.grad else {}
        with RunningForward(self._kind()), ExitStack() as stack:
            args.context.enter(stack, grad=self.grad)
            inputs = self._take_inputs()
            gradients = self._enter_contexts(stack, weights)
            self._enter_mode(stack)
            self._run_layers(inputs, weights)
            loss = self._loss() if args.target else None
            if not stage.in_place.is_never:
                stage.in_place.record(inputs)
        if self.refused is not None:
            self.refused.check(stage.name)
        if self.kept is not None:
            self.kept.finish()
        if gradients:
            stage.inner_gradients.record_accumulation()
        return self._graph(inputs, loss, gradients)

    @property
    def _keeps_results(self) -> bool:
        is_first = self.args.recompute and not self.again
        return self.grad and is_first and self.args.keeps_results and not self.stage.is_opaque

    def _kind(self) -> ForwardKind:
        if self.again:
            return ForwardKind.AGAIN
        return ForwardKind.ONLY if self.keeps_graph or not self.grad else ForwardKind.FIRST

    def _interceptor(self, *, observes: bool) -> WeightCallInterceptor | None:
        """Return what sees the functions of the forward, if they are of interest."""
        stage = self.stage
        is_wanted = self.args.in_halves or stage.is_fused
        intercepts = self.keeps_graph and not stage.is_opaque and is_wanted
        if not (intercepts or observes):
            return None
        inner = stage.inner_gradients
        tables = stage.tables if stage.tables.layers else None
        return WeightCallInterceptor(inner, tables, intercepts=intercepts, observes=observes)

    def _take_inputs(self) -> list[StageInput]:
        """Bring the values that the stage reads into a graph of its own."""
        stage, args, inputs = self.stage, self.args, list[StageInput]()
        is_kept = args.recompute and not self.again  # the inputs are needed once more
        for value in stage.reads:
            tree = args.values[value]
            if stage.accelerator is not None and value.writer == INPUT:
                tree = brought(tree, stage.accelerator)
            self.reads[value] = tensors = trees.tensors(tree)
            self.values[value] = tree
            inputs += stage.in_place.take_in(value, tensors, args.marks, is_kept=is_kept)
        later = stage.in_place.read_later
        read_later = [i for i, item in enumerate(inputs) if item.value in later] if later else ()
        entered = iter(self.graph_inputs.enter([item.given for item in inputs], read_later))

        def replaced(leaf: Any) -> Any:
            return next(entered) if isinstance(leaf, Tensor) else trees.as_graph_leaf(leaf)

        for value in stage.reads:
            self.values[value] = trees.map_leaves(replaced, self.values[value])
        return inputs

    def _enter_contexts(
        self, stack: ExitStack, versions: Mapping[int, Mapping[str, Tensor]]
    ) -> ForwardGradients:
        """Enter what the layers need around them; return the gradients from inside the forward.

        Most need nothing, and to enter a context costs a microsecond for each micro-batch.
        """
        stage, args = self.stage, self.args
        if stage.inner_gradients.may_use_forward_mode(self.loss_fn):
            stack.enter_context(FORWARD_MODE_LOCK)
        if (hooks := self._saved_tensor_hooks()) is not None:
            stack.enter_context(hooks)
        # outside of the interceptor, which would see each access to a tensor as a call
        gradients = self._forward_gradients(stack, versions)
        if self.interceptor is not None:
            stack.enter_context(self.interceptor)
        if stage.statistics.modules:
            observed = stage.statistics.observe(args.step, args.microbatch, again=self.again)
            stack.enter_context(observed)
        return gradients

    def _enter_mode(self, stack: ExitStack) -> None:
        """Keep results of costly operators, or take those that the first forward kept."""
        if self.kept is not None:
            stack.enter_context(KeepingMode(self.stage, self.kept))
        elif self.again and self.args.results is not None:
            stack.enter_context(TakingMode(self.stage, self.args.results))

    def _saved_tensor_hooks(self) -> AbstractContextManager[Any] | None:
        """Drop saved tensors if the forward will be recomputed, or move them to host memory."""
        if not self.grad or self.needs_saved_tensors:
            return None
        if not self.keeps_graph:
            # torch picks other kernels, with other bits, where no graph is recorded; so one is, and
            # what it would save for the backward is dropped at once
            return saved_tensors_hooks(_drop, self.stage.inner_gradients.need_saved_tensor)
        if self.offloaded:
            return saved_tensors_hooks(self.offloaded.pack, self.offloaded.unpack)
        return None

    def _forward_gradients(
        self, stack: ExitStack, versions: Mapping[int, Mapping[str, Tensor]]
    ) -> ForwardGradients:
        """Collect or refuse gradients that a backward inside the forward brings to weights."""
        stage, inner = self.stage, self.stage.inner_gradients
        if not self.grad or inner.is_trusted(self.loss_fn):
            return []
        own = [layer.aliases for layer in stage.stage_layers if layer.aliases]
        weights = inner.weights(versions.values() if versions else own)
        if inner.collects and not stage.is_opaque:
            return stack.enter_context(collected_gradients(weights))
        self.refused = RefusedGradients(weights)
        return []

    def _run_layers(
        self, inputs: list[StageInput], weights: Mapping[int, dict[str, Tensor]]
    ) -> None:
        in_place = self.stage.in_place
        for layer in self.stage.stage_layers:
            if self.interceptor:
                self.interceptor.layer = layer.number
            self._run_layer(layer, weights.get(layer.number, layer.aliases))
            if not in_place.is_never:
                in_place.check_layer(layer.name, inputs)
            for value in layer.last_uses:
                del self.values[value]
        if self.interceptor:
            self.interceptor.layer = LOSS_NUMBER

    def _run_layer(self, layer: StageLayer, aliases: dict[str, Tensor] | None) -> None:
        draws, module = self.stage.draws, layer.module
        self.stage.running_layer = layer.name
        given = [self.values[value] for value in layer.sources]
        tables = self._tables(layer.number)
        if module in draws.deterministic and tables is NOTHING:
            result = _call(module, aliases, given)
        else:
            with draws.of_layer(module, self._key(layer.name)), tables:
                result = _call(module, aliases, given)
        self.values.update(zip(layer.writes, layer.layer.written(result), strict=True))

    def _tables(self, layer: int) -> AbstractContextManager[Any]:
        """Replace lookups in the layer's large tables, unless calls are intercepted anyway."""
        if layer not in self.stage.tables.layers or not self.keeps_graph:
            return NOTHING
        is_done = self.interceptor is not None and self.interceptor.intercepts
        return NOTHING if is_done else self.stage.tables

    def _loss(self) -> Tensor:
        stage, target = self.stage, self.args.target
        assert target is not None  # this is the last stage
        stage.running_layer = LOSS
        output = self.values[stage.output]
        with stage.draws.of_loss(target.loss_fn, self._key(LOSS)):
            return target.loss(output, stage.accelerator)

    def _key(self, name: str) -> RandomKey:
        args = self.args
        step = 0 if args.has_own_seed else args.step
        return RandomKey(args.seed, step, args.first + args.microbatch, name)

    def _graph(
        self, inputs: list[StageInput], loss: Tensor | None, gradients: ForwardGradients
    ) -> StageGraph:
        args, stage = self.args, self.stage
        writes = self._written()
        sent = [(v, i, t) for v, tree in writes.items() for i, t in enumerate(trees.tensors(tree))]
        kept = self.kept.tensors if self.kept else []
        return StageGraph(
            inputs=self.graph_inputs,
            reads=self.reads,
            writes=writes,
            loss=loss,
            target=args.target,
            marks=stage.in_place.mark_outputs(sent, inputs, kept),
            calls=self.interceptor.calls if self.interceptor else [],
            offloaded=self.offloaded,
            version=args.version,
            forward_gradients=gradients,
            results=self.kept,
        )

    def _written(self) -> dict[Value, Any]:
        """Return the values that other stages read, and the output if there is no loss.

        In new containers: a layer may still change a dict or list that it returned.
        """
        stage, kept = self.stage, self.stage.sent
        if stage.has_output and not self.args.target and stage.output not in kept:
            kept = (*kept, stage.output)
        return {value: trees.map_leaves(trees.identity, self.values[value]) for value in kept}


@runs_user_code
def _call(module: nn.Module, aliases: Mapping[str, Tensor] | None, given: list[Any]) -> Any:
    if not aliases:
        return module(*given)
    with replaced_parameters(module, aliases):
        return module(*given)


@skipped_by_compiler
def _drop(_: Any) -> Tensor:
    """Return an empty tensor in place of a saved one whose backward will not come."""
    return EMPTY
