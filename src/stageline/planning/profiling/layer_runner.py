"""Run each layer of a model as a stage of its own, with the runtime's code, on one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.errors import StageError
from stageline.model import trees
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime.accelerators.measured_devices import device_of
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.checks import edges_of
from stageline.runtime.stage.stage import Stage
from stageline.runtime.stage.stage_values import ForwardArgs, Gradients, InFlight, Target


class LayerForward(NamedTuple):
    """A forward of one layer whose backward has not run yet."""

    number: int  # of the layer
    in_halves: bool
    written: dict[Value, Any]
    waiting: InFlight

    @property
    def results(self) -> list[Tensor]:
        """Return what is kept for a selective recomputation."""
        kept = self.waiting.recomputations[0].args.results
        return kept.tensors if kept is not None else []


class LayerRunner:
    """Runs layers one by one.

    State: a stage for each layer, and the values that layers have written. `device` is the
    accelerator that they run on, or None.
    """

    def __init__(
        self,
        layers: LayerSequence,
        inputs: Mapping[str, Any],
        target: Target | None,
        context: ForwardContext,
    ) -> None:
        self.layers, self.target, self.context = layers, target, context
        self.tied = TiedWeights.of(layers)
        cuts = tuple(range(number, number + 1) for number in range(len(layers)))
        _, sent = edges_of(layers, cuts)
        self.stages = [
            Stage(layers, numbers, values, self.tied, "minibatch")
            for numbers, values in zip(cuts, sent, strict=True)
        ]
        self.values: dict[Value, Any] = {Value(INPUT, n): value for n, value in inputs.items()}
        self.device = device_of([*layers.modules.parameters(), *trees.tensors(dict(inputs))])

    def run_all(self) -> None:
        """Run the forward of every layer once, and keep the values that layers write."""
        for number in range(len(self.layers)):
            self.values.update(self.forward(number, in_halves=False).written)

    def forward(self, number: int, *, in_halves: bool, keeps_results: bool = False) -> LayerForward:
        """Run F of one layer; `in_halves` if I and W follow instead of B.

        `keeps_results` if a selective recomputation follows.
        """
        stage, waiting = self.stages[number], InFlight()
        args = ForwardArgs(
            microbatch=0,
            values={value: self.values[value] for value in self.layers.sources[number]},
            target=self.target if stage.has_output else None,
            seed=0,
            step=0,
            first=0,
            context=self.context,
            in_halves=in_halves,
            recompute=keeps_results,
            keeps_results=keeps_results,
        )
        try:
            written = stage.forward(args, waiting).written
        except Exception as error:
            raise self._failure(number, error) from error
        stage.statistics.clear()
        stage.inner_gradients.stop_observing()  # the next run is as those after the first step
        return LayerForward(number, in_halves, written, waiting)

    def keep_results(self, number: int) -> LayerForward:
        """Run F of one layer as it is if a selective recomputation follows."""
        return self.forward(number, in_halves=False, keeps_results=True)

    def recompute(self, run: LayerForward) -> None:
        """Run F again; a backward may follow."""
        try:
            self.stages[run.number].prepare_backward(0, run.waiting)
        except Exception as error:
            raise self._failure(run.number, error) from error

    def output_gradients(self, run: LayerForward) -> Gradients:
        """Return ones in place of the gradients that later layers would send."""
        return {
            value: [_ones_like(tensor) for tensor in trees.tensors(tree)]
            for value, tree in run.written.items()
        }

    def backward(self, run: LayerForward, gradients: Gradients) -> None:
        """Run B, or I if the backward is in halves."""
        stage = self.stages[run.number]
        try:
            stage.backward(0, gradients, run.waiting, in_halves=run.in_halves)
        except Exception as error:
            raise self._failure(run.number, error) from error

    def weight_gradients(self, run: LayerForward) -> None:
        """Run W of a backward in halves."""
        self.stages[run.number].weight_gradients(0, run.waiting)

    def zero_grad(self, number: int) -> None:
        """Delete the gradients of one layer's parameters."""
        self.layers.layers[number].module.zero_grad()
        self.tied.refresh()

    def _failure(self, number: int, error: Exception) -> StageError:
        shapes = [
            tuple(tensor.shape)
            for value in self.layers.sources[number]
            for tensor in trees.tensors(self.values[value])
        ]
        return StageError(
            f"layer {self.stages[number].running_layer!r} failed on inputs of shapes "
            f"{', '.join(map(str, shapes))}\n  {type(error).__name__}: {error}"
        )


def _ones_like(tensor: Tensor) -> Tensor | None:
    return torch.ones_like(tensor) if tensor.requires_grad else None
