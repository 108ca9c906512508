"""Values that enter and leave a stage's forward, and those that it keeps until the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.arguments import shown
from stageline.errors import ModelError
from stageline.model.layers import Value
from stageline.model.own_loss import own_loss
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.carry import brought
from stageline.runtime.accelerators.code_places import runs_user_code
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.in_place import NO_MARKS, Marks
from stageline.runtime.exactness.inner_gradients import ForwardGradients
from stageline.runtime.exactness.layer_state import StateSnapshot
from stageline.runtime.stage.kept_results import KeptResults
from stageline.runtime.stage.offload import OffloadedTensors
from stageline.runtime.stage.stage_border import GraphInputs
from stageline.runtime.stage.weight_calls import WeightCall

Values = Mapping[Value, Any]
Gradients = dict[Value, list[Tensor | None]]  # of each value, those of its tensors


@dataclass(frozen=True)
class Target:
    """The loss function, the target of one micro-batch, and the micro-batch's weight.

    `scale`: what all gradients are multiplied by in addition, but not the loss.
    """

    loss_fn: Callable[[Any, Any], Tensor]
    target: Any
    weight: float
    scale: Tensor | None = None

    def loss(self, output: Any, accelerator: Accelerator | None = None) -> Tensor:
        """Return the loss of an output; raise ModelError if it is not one number."""
        target = self.target if accelerator is None else brought(self.target, accelerator)
        try:
            loss = _call(self.loss_fn, output, target)
        except Exception as error:
            if target is not None or self.loss_fn is own_loss:
                raise
            raise ModelError(
                f"the target is None, and loss_fn raised {type(error).__name__}: {error}: give "
                "inputs and target as two arguments, as in pipe.step(inputs, target)"
            ) from error
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"the loss is {shown(loss)} of type {type(loss).__name__}, but has to be a tensor "
                "with one number: return the tensor itself, without .item() or float()"
            )
        if loss.numel() != 1:
            raise ModelError(
                f"the loss has shape {tuple(loss.shape)}, but has to be one number: return the "
                "mean over the samples, or their sum if there is a count_fn"
            )
        return loss

    def loss_gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss that its backward starts with.

        With a scale it has the bits that `(loss * scale).backward(weight)` has.
        """
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not require a gradient, so there is nothing to train: check that "
                "some parameters have requires_grad=True, and that neither the model nor loss_fn "
                "detaches what it returns"
            )
        if self.scale is None:
            return torch.full_like(loss, self.weight)
        scale = self.scale.to(loss.device, non_blocking=True)
        of_product = torch.full_like(loss, self.weight, dtype=torch.result_type(loss, scale))
        return (of_product * scale).to(loss.dtype)


@runs_user_code
def _call(loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Tensor:
    return loss_fn(output, target)


class ForwardArgs(NamedTuple):
    """Everything that the forward of a micro-batch depends on."""

    microbatch: int
    values: Values  # that the stage reads
    target: Target | None  # on the last stage, if the loss is computed there
    seed: int
    step: int
    first: int  # number of the first micro-batch here, among those of all replicas
    context: ForwardContext
    in_halves: bool = False  # the backward is split in I and W
    recompute: bool = False  # keep only what is read, and run the forward again for the backward
    keeps_results: bool = False  # of costly operators, for the recomputation
    offload: bool = False  # keep saved tensors in host memory
    version: int = 0  # of the weights, if several versions are in use
    marks: Marks = NO_MARKS  # of the tensors in `values`: who else uses their memory
    has_own_seed: bool = False  # random numbers depend on `seed`, but not on `step`
    results: KeptResults | None = None  # that the first forward kept for this recomputation


class ForwardResult(NamedTuple):
    """The values, marks and loss that a forward returns."""

    written: dict[Value, Any]  # that later stages read
    marks: Marks
    loss: Tensor | None


class RecomputationInput(NamedTuple):
    """The arguments and state that a recomputation starts from, and its tensors' versions."""

    args: ForwardArgs
    versions: list[int]
    target_versions: list[int]
    state: StateSnapshot  # of the layers, as far as the first forward changed it


class StageGraph(NamedTuple):
    """The graph of one micro-batch, kept from its forward to its backward."""

    inputs: GraphInputs
    reads: dict[Value, list[Tensor]]  # the tensors that entered, kept as long as the graph
    writes: dict[Value, Any]  # values that later stages read
    loss: Tensor | None
    target: Target | None  # that the loss was computed with
    marks: Marks  # of what is written
    calls: list[WeightCall]  # that use weights, if they were intercepted
    offloaded: OffloadedTensors | None
    version: int  # of the weights that were used
    forward_gradients: ForwardGradients  # that a backward inside the forward brought to weights
    results: KeptResults | None  # that this forward kept for its recomputation


@dataclass
class InFlight:
    """The micro-batches in flight in one stage during one step, by number."""

    # from a forward to its recomputation
    recomputations: dict[int, RecomputationInput] = field(default_factory=dict)
    graphs: dict[int, StageGraph] = field(default_factory=dict)  # from a forward to its backward
    # from an I to its W: the calls, and the version of the weights
    deferred: dict[int, tuple[list[WeightCall], int]] = field(default_factory=dict)
    # from a forward to its backward
    forward_gradients: dict[int, ForwardGradients] = field(default_factory=dict)
