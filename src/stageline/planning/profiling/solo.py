"""Each layer of a model as a stage of its own, which the runtime runs on one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.errors import StageError
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime import trees
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.checks import edges_of
from stageline.runtime.stage.stage import Stage
from stageline.runtime.stage.stage_values import ForwardArgs, Gradients, InFlight, Target


class Run(NamedTuple):
    """A forward whose backward is still to come."""

    number: int  # of the layer
    in_halves: bool
    written: dict[Value, Any]
    waiting: InFlight


class Solo:
    """State: what the stages have seen of their layers, and the values that were put down."""

    def __init__(
        self,
        layers: LayerSequence,
        inputs: Mapping[str, Any],
        target: Target | None,
        ambient: ForwardContext,
    ) -> None:
        self.layers, self.target, self.ambient = layers, target, ambient
        self.tied = TiedWeights.of(layers)
        cuts = tuple(range(number, number + 1) for number in range(len(layers)))
        _, sent = edges_of(layers, cuts)
        self.stages = [
            Stage(layers, numbers, values, self.tied, "minibatch")
            for numbers, values in zip(cuts, sent, strict=True)
        ]
        self.values: dict[Value, Any] = {Value(INPUT, n): value for n, value in inputs.items()}

    def fill(self) -> None:
        """Run all layers once and put down what they write."""
        for number in range(len(self.layers)):
            self.values.update(self.forward(number, in_halves=False).written)

    def forward(self, number: int, *, in_halves: bool) -> Run:
        stage, waiting = self.stages[number], InFlight()
        this = ForwardArgs(
            microbatch=0,
            values={value: self.values[value] for value in self.layers.sources[number]},
            target=self.target if stage.has_output else None,
            seed=0,
            step=0,
            first=0,
            context=self.ambient,
            in_halves=in_halves,
        )
        try:
            written = stage.forward(this, waiting).written
        except Exception as error:
            raise self._failure(number, error) from error
        stage.statistics.clear()
        stage.inner_gradients.stop_observing()  # the next one is as those after the first step
        return Run(number, in_halves, written, waiting)

    def ones(self, run: Run) -> Gradients:
        """In place of the gradients that later layers would send."""
        return {
            value: [_one(tensor) for tensor in trees.tensors(tree)]
            for value, tree in run.written.items()
        }

    def backward(self, run: Run, gradients: Gradients) -> None:
        """B, or I if it comes in halves."""
        stage = self.stages[run.number]
        try:
            stage.backward(0, gradients, run.waiting, in_halves=run.in_halves)
        except Exception as error:
            raise self._failure(run.number, error) from error

    def weight_gradients(self, run: Run) -> None:
        self.stages[run.number].weight_gradients(0, run.waiting)

    def forget_gradients(self, number: int) -> None:
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


def _one(tensor: Tensor) -> Tensor | None:
    return torch.ones_like(tensor) if tensor.requires_grad else None
