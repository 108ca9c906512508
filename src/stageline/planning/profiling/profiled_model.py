"""The model to profile, its loss, and the example batch from which micro-batches are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.arguments import check_function
from stageline.errors import PlanError
from stageline.model.any_model import layers_of
from stageline.model.inputs import batch_inputs, microbatch_inputs
from stageline.model.layers import Layer, LayerSequence
from stageline.model.own_loss import own_loss
from stageline.model.uncut import unmarked
from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.planning.profiling.resize_batch import microbatch_sizes, resize_batch
from stageline.runtime.accelerators.measured_devices import device_of
from stageline.runtime.batches import microbatches
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.stage.stage_values import Target

Model = LayerSequence | nn.Module | Sequence[Layer | nn.Module]
LossFunction = Callable[[Any, Any], Tensor]


class ProfiledModel(NamedTuple):
    """A model as layers, with named inputs; a loss, if given, is part of the last layer."""

    layers: LayerSequence
    inputs: dict[str, Any]
    loss_fn: LossFunction | None
    target: Any
    context: ForwardContext

    @staticmethod
    def of(
        model: Model, example_inputs: Any, loss_fn: LossFunction | None, target: Any
    ) -> ProfiledModel:
        """Check the arguments of `sl.profile` and `sl.estimate`, and bring them into one form."""
        if loss_fn is None and target is not None:
            raise PlanError("target is given without a loss_fn: give both")
        if loss_fn is not None:
            check_function("loss_fn", loss_fn)
        layers = layers_of(model, unmarked(example_inputs), {})
        inputs = batch_inputs(layers, example_inputs)
        if loss_fn is None and layers.recording is not None and layers.recording.has_own_loss:
            loss_fn = own_loss
        return ProfiledModel(layers, inputs, loss_fn, target, ForwardContext.current())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def device(self) -> torch.device | None:
        """The accelerator that the model is on, or None."""
        return device_of(self.layers.modules.parameters())

    @property
    def num_samples(self) -> int:
        """The number of samples of the example."""
        return microbatches.num_samples(self.inputs, self.target)

    def microbatch_sizes(self, sizes: Sequence[int] | None) -> list[int]:
        """Return the sizes to profile: those given, or the default ones."""
        return microbatch_sizes(sizes, self.inputs, self.target)

    def runner(self, num_samples: int) -> LayerRunner:
        """Return a runner of the layers with a micro-batch of this size."""
        target = None
        if self.loss_fn:
            target = Target(self.loss_fn, resize_batch(self.target, num_samples), 1.0)
        inputs = microbatch_inputs(self.layers, resize_batch(self.inputs, num_samples))
        return LayerRunner(self.layers, inputs, target, self.context)
