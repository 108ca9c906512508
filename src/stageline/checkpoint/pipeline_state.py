"""Everything that a checkpoint reads from a pipeline, under the names of the user's model.

    model.<layer>.<name>                parameters and buffers
    optimizer.<layer>.<name>.<state>    the optimizer's state of a parameter, such as exp_avg
    random.cpu                          torch's own generator; Stageline's randomness is two numbers

A tensor that several layers use has one name, its first, and one writer, the rank of that layer.
Every process knows the names of all tensors, so no communication is needed for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.arguments import shown
from stageline.checkpoint.group import has_rank, is_written_here
from stageline.checkpoint.json_values import to_json
from stageline.checkpoint.record import GroupOptions, SchedulerState, common_scheduler_state
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline, session_of
from stageline.runtime.optimizers.param_groups import group_options

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random.cpu"


class NamedTensor(NamedTuple):
    """A parameter or buffer of a layer."""

    name: str  # its first name in the model
    own_name: str  # its name in this layer
    tensor: Tensor
    layer: str
    rank: int  # of the layer


@dataclass(frozen=True)
class ProcessState:
    """The part of a checkpoint that one process contributes."""

    tensors: Mapping[str, Tensor]
    groups: tuple[GroupOptions, ...]
    values: Mapping[str, Mapping[str, Any]]
    scheduler: SchedulerState | None

    @property
    def fields(self) -> dict[str, Any]:
        """All but the tensors, in types that can be sent to other processes."""
        return {
            "groups": [asdict(group) for group in self.groups],
            "values": self.values,
            "scheduler": self.scheduler and asdict(self.scheduler),
        }


def model_tensors(pipe: Pipeline) -> Iterator[NamedTensor]:
    """Yield the tensors of all layers in order, including layers of other processes."""
    first: dict[Tensor, str] = {}
    for layer, rank in zip(
        pipe.layers, session_of(pipe).assembly.layout.rank_of_layer, strict=True
    ):
        for name, tensor in layer.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"layer {layer.name!r} has {name!r} in its state, a {type(tensor).__name__}, "
                    "but a checkpoint stores tensors: make it a buffer, or save it with `data`"
                )
            own_name = layer.full_name(name)
            name_in_model = first.setdefault(tensor, own_name)
            yield NamedTensor(name_in_model, own_name, tensor, layer.name, rank)


def local_tensors(pipe: Pipeline) -> dict[str, Tensor]:
    """Return the tensors of this process's layers by name."""
    return {each.name: each.tensor for each in model_tensors(pipe) if has_rank(pipe, each.rank)}


def tensor_names(pipe: Pipeline) -> dict[Tensor, str]:
    """Return the name of each of the model's tensors."""
    return {each.tensor: each.name for each in model_tensors(pipe)}


def has_own_optimizers(pipe: Pipeline) -> bool:
    return session_of(pipe).optimizers is not None


def schedulers_of(pipe: Pipeline) -> Sequence[LRScheduler]:
    """Return the schedulers that the pipeline itself made."""
    optimizers = session_of(pipe).optimizers
    return optimizers.schedulers if optimizers else ()


def optimizers_of(pipe: Pipeline, optimizer: Optimizer | None) -> tuple[Optimizer, ...]:
    """Return the given optimizer or else the pipeline's own; raise if there is no common state."""
    if session_of(pipe).is_streaming:
        raise CheckpointError(
            "a stream of pipe.run is in progress, so stages are at different steps: consume its "
            "results or close() it before you save or load"
        )
    if optimizer is None:
        return pipe.optimizers
    if has_own_optimizers(pipe):
        raise CheckpointError(
            f"an optimizer was given, a {type(optimizer).__name__}, but the pipeline has its own: "
            "omit it"
        )
    return (optimizer,)


def counters_of(pipe: Pipeline) -> dict[str, int]:
    """Return the numbers that determine the randomness of the next step."""
    return {"num_steps": pipe.num_steps, "seed": session_of(pipe).seed}


def set_counters(pipe: Pipeline, num_steps: int, seed: int) -> None:
    session = session_of(pipe)
    session.num_steps, session.seed = num_steps, seed


def collect_state(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> ProcessState:
    """Return what this process saves: tensors whose first layer it has, in the first replica.

    Of weights that are sharded over the replicas each of these saves its part. Other processes may
    have the same tensors, such as the parts of a tensor-parallel group; `save` selects one writer
    for each.
    """
    writers: dict[str, int] = {}
    names: dict[Tensor, str] = {}
    for each in model_tensors(pipe):
        writers.setdefault(each.name, each.rank)
        names[each.tensor] = each.name
    own = {
        tensor: name
        for tensor, name in names.items()
        if has_rank(pipe, writers[name]) and is_written_here(pipe, tensor)
    }
    tensors = {f"{MODEL}{name}": tensor for tensor, name in own.items()}
    random = torch.get_rng_state()
    if has_rank(pipe, 0) and is_written_here(pipe, random):
        tensors[RANDOM] = random
    for optimizer in optimizers:
        check_parameters(optimizer, names)
    states = {own[p]: state for each in optimizers for p, state in each.state.items() if p in own}
    values: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}.{_state_name(key, value)}"] = value
            else:
                values.setdefault(name, {})[_state_name(key, value)] = value
    groups = tuple(group for each in optimizers for group in _groups(each, own))
    return ProcessState(tensors, groups, values, _scheduler_state(schedulers_of(pipe)))


def check_parameters(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Raise `CheckpointError` if the optimizer has a parameter that the model does not have."""
    if not hasattr(optimizer, "param_groups"):
        raise CheckpointError(
            f"the optimizer is {shown(optimizer)}, but has to be an object of a torch.optim class: "
            "make one from pipe.parameters()"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "pipeline does not have: make the optimizer from pipe.parameters()"
                )


def _scheduler_state(schedulers: Sequence[LRScheduler]) -> SchedulerState | None:
    states = [
        SchedulerState(
            type(each).__name__,
            to_json("the scheduler's state", _without_tensors(each.state_dict())),
        )
        for each in schedulers
    ]
    return common_scheduler_state(states)


def _without_tensors(value: Any) -> Any:
    """Replace tensors of one element by numbers: learning rates may be tensors."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_without_tensors, value))
    return value


def _groups(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[GroupOptions]:
    for group in optimizer.param_groups:
        values = {
            key: to_json(f"the optimizer's option {key!r}", value)
            for key, value in group_options(group).items()
        }
        own = tuple(names[p] for p in group["params"] if p in names)
        yield GroupOptions(type(optimizer).__name__, values, own)


def _state_name(key: object, value: object) -> str:
    """Return the name of an optimizer state; raise if a checkpoint cannot store it."""
    is_name = isinstance(key, str) and "." not in key
    if not is_name or not isinstance(value, Tensor | int | float | str | None):
        raise CheckpointError(
            f"the optimizer keeps {key!r}, a {type(value).__name__}, for a parameter, but a "
            "checkpoint stores tensors, numbers and strings under names without dots: save the "
            "model without the optimizer"
        )
    return str(key)
