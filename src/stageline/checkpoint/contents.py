"""What a checkpoint holds: tensors by name, and the rest as JSON.

    model.<layer>.<name>                parameters and buffers
    optimizer.<layer>.<name>.<state>    what the optimizer keeps for a parameter, such as exp_avg
    random.cpu                          torch's own generator; Stageline's randomness is two numbers

A tensor that several layers use has one name, its first, and one writer, the rank that holds that
layer. Every process has the names of all tensors, so nobody needs to ask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.checkpoint.storage import File, Size
from stageline.checkpoint.values import encode
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.runtime.optimizers.param_groups import options

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random.cpu"
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)]
STRICT = ConfigDict(extra="forbid")


class Place(NamedTuple):
    """A parameter or buffer where a layer uses it."""

    name: str  # the first that it has in the model
    own_name: str  # the one that it has here
    tensor: Tensor
    layer: str
    rank: int  # of the layer


@checked(frozen=True, config=STRICT)
class Options:
    """What a group of parameters is trained with."""

    kind: str  # of optimizer
    values: dict[str, Any]  # encoded
    names: tuple[str, ...]


@checked(frozen=True, config=STRICT)
class SchedulerState:
    """What the pipeline's own schedulers know, which is the same on all ranks."""

    kind: str
    state: dict[str, Any]  # encoded


@checked(frozen=True, config=STRICT)
class Record:
    """All that is no tensor. It checks its types and limits when it is made."""

    number: Size  # counts the checkpoints of a folder in the order in which they were saved
    step: Size
    data: Any  # encoded
    num_steps: Size
    seed: Seed
    files: tuple[File, ...]
    groups: tuple[Options, ...]  # none: no optimizer was saved
    # what the optimizer keeps that is no tensor, by name
    values: dict[str, dict[str, bool | int | float | str | None]]
    scheduler: SchedulerState | None

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Record:
        """Return a record with these fields; raise ValueError with the first that is wrong."""
        try:
            return _RECORD.validate_python(dict(fields))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"its {place} is wrong: {first['msg'].lower()}") from None

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class Part:
    """What one process has to save."""

    tensors: Mapping[str, Tensor]
    groups: tuple[Options, ...]
    values: Mapping[str, Mapping[str, Any]]
    scheduler: SchedulerState | None

    @property
    def fields(self) -> dict[str, Any]:
        """All but the tensors, as other processes are told."""
        return {
            "groups": [asdict(group) for group in self.groups],
            "values": self.values,
            "scheduler": self.scheduler and asdict(self.scheduler),
        }


def places(pipe: Pipeline) -> Iterator[Place]:
    """Of all layers, those of other processes too, in their order."""
    first: dict[Tensor, str] = {}
    for layer, rank in zip(pipe.layers, pipe.homes, strict=True):
        for name, tensor in layer.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"layer {layer.name!r} has {name!r} in its state, a {type(tensor).__name__}, "
                    "but a checkpoint holds tensors: make it a buffer, or save it with `data`"
                )
            here = f"{layer.name}.{name}"
            yield Place(first.setdefault(tensor, here), here, tensor, layer.name, rank)


def used_here(pipe: Pipeline) -> dict[str, Tensor]:
    """By name, what the layers of this process use."""
    return {place.name: place.tensor for place in places(pipe) if pipe.peers.has(place.rank)}


def optimizers_of(pipe: Pipeline, optimizer: Optimizer | None) -> tuple[Optimizer, ...]:
    """Those of the pipeline, or the one that is given."""
    if pipe.is_streaming:
        raise CheckpointError(
            "a stream of run is on its way, in which stages are at different steps: use up its "
            "results, or close() it, and save or load then"
        )
    if optimizer is None:
        return pipe.optimizers
    if pipe.stepper is not None:
        raise CheckpointError(
            f"an optimizer was given, a {type(optimizer).__name__}, but the pipeline has its own: "
            "leave it out"
        )
    return (optimizer,)


def part_of(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> Part:
    """What this process has to save: what it is the first to use, if it is of the first replica.

    Of processes that hold the same, the writing lets one write it.
    """
    writers: dict[str, int] = {}
    names: dict[Tensor, str] = {}
    for place in places(pipe):
        writers.setdefault(place.name, place.rank)
        names[place.tensor] = place.name
    is_writer = [
        pipe.peers.replica == 0 and pipe.peers.has(rank) for rank in range(pipe.schedule.num_ranks)
    ]
    own = {tensor: name for tensor, name in names.items() if is_writer[writers[name]]}
    tensors = {f"{MODEL}{name}": tensor for tensor, name in own.items()}
    if is_writer[0]:
        tensors[RANDOM] = torch.get_rng_state()
    for optimizer in optimizers:
        check_parameters(optimizer, names)
    kept = {own[p]: state for each in optimizers for p, state in each.state.items() if p in own}
    values: dict[str, dict[str, Any]] = {}
    for name, state in kept.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}.{_state_name(key, value)}"] = value
            else:
                values.setdefault(name, {})[_state_name(key, value)] = value
    groups = tuple(group for each in optimizers for group in _groups(each, own))
    return Part(tensors, groups, values, _scheduler_state(pipe))


def check_parameters(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "pipeline does not have: make the optimizer from pipe.parameters()"
                )


def merged(groups: Sequence[Options]) -> tuple[Options, ...]:
    """Those of all ranks; what has the same options is one group."""
    names: dict[str, list[str]] = {}
    same: dict[str, Options] = {}
    for group in groups:
        key = json.dumps([group.kind, group.values])
        names.setdefault(key, []).extend(group.names)
        same.setdefault(key, group)
    return tuple(
        replace(same[key], names=tuple(dict.fromkeys(found)))
        for key, found in names.items()
        if found
    )


def same_scheduler(states: Sequence[SchedulerState | None]) -> SchedulerState | None:
    """Return the one that is there; those of several stages have to be in the same state."""
    found = [state for state in states if state is not None]
    for state in found:
        if state != found[0]:
            raise CheckpointError(
                f"the schedulers of two stages, {found[0].kind} and {state.kind}, are in different "
                "states, but a checkpoint has one for all, so that stages may be cut anew: give "
                "all stages the same optimizer and scheduler"
            )
    return found[0] if found else None


def _scheduler_state(pipe: Pipeline) -> SchedulerState | None:
    schedulers: Sequence[LRScheduler] = pipe.stepper.schedulers if pipe.stepper else ()
    return same_scheduler(
        [
            SchedulerState(
                type(each).__name__, encode("the scheduler's state", _numbers(each.state_dict()))
            )
            for each in schedulers
        ]
    )


def _numbers(value: Any) -> Any:
    """Return it with numbers for tensors of one element: rates may be tensors."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_numbers, value))
    return value


def _groups(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[Options]:
    for group in optimizer.param_groups:
        values = {
            key: encode(f"the optimizer's option {key!r}", value)
            for key, value in options(group).items()
        }
        own = tuple(names[p] for p in group["params"] if p in names)
        yield Options(type(optimizer).__name__, values, own)


def _state_name(key: object, value: object) -> str:
    """A state's name, if it and the value are such that a checkpoint can hold them."""
    is_name = isinstance(key, str) and "." not in key
    if not is_name or not isinstance(value, Tensor | int | float | str | None):
        raise CheckpointError(
            f"the optimizer keeps {key!r}, a {type(value).__name__}, for a parameter, but a "
            "checkpoint holds tensors, numbers and text under plain names: save the model without "
            "the optimizer"
        )
    return str(key)
