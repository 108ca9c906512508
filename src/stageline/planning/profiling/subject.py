"""What is profiled: a model, its loss, and a batch to take micro-batches from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from stageline.arguments import check_function
from stageline.errors import PlanError
from stageline.model.inputs import named_inputs
from stageline.model.layers import Layer, LayerSequence
from stageline.planning.profiling.samples import checked_sizes, resized
from stageline.planning.profiling.solo import Solo
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.stage.stage_values import Target

Model = LayerSequence | nn.Module | Sequence[Layer | nn.Module]
LossFunction = Callable[[Any, Any], Tensor]


class Subject(NamedTuple):
    """Inputs by their names; the loss, if there is one, is part of the last layer."""

    layers: LayerSequence
    inputs: dict[str, Any]
    loss_fn: LossFunction | None
    target: Any
    ambient: ForwardContext

    @staticmethod
    def of(model: Model, sample: Any, loss_fn: LossFunction | None, target: Any) -> Subject:
        if loss_fn is None and target is not None:
            raise PlanError("there is a target, but no loss_fn to compare with it: give both")
        if loss_fn is not None:
            check_function("loss_fn", loss_fn)
        layers = LayerSequence.of(model)
        return Subject(
            layers, named_inputs(layers, sample), loss_fn, target, ForwardContext.current()
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    def sizes(self, wanted: Sequence[int] | None) -> list[int]:
        return checked_sizes(wanted, self.inputs, self.target)

    def solo(self, samples: int) -> Solo:
        """Its layers, with a micro-batch of so many samples."""
        target = Target(self.loss_fn, resized(self.target, samples), 1.0) if self.loss_fn else None
        return Solo(self.layers, resized(self.inputs, samples), target, self.ambient)
