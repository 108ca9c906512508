"""sl.load: check and read everything before anything is changed.

    find ─► record ─► headers ─► compatible? ─► verify checksums ─► all ranks agree ─► apply

The last step cannot fail, or was tried on a copy before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.checkpoint import folder as folders
from stageline.checkpoint.compatibility import Checkpoint, check_compatible
from stageline.checkpoint.group import checkpoint_group
from stageline.checkpoint.json_values import from_json
from stageline.checkpoint.option_values import new_options, new_scheduler_state
from stageline.checkpoint.pipeline_state import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    check_parameters,
    local_tensors,
    optimizers_of,
    schedulers_of,
    set_counters,
    tensor_names,
)
from stageline.checkpoint.read_tensors import TensorReader, damaged, stored_tensors
from stageline.checkpoint.record import Record
from stageline.checkpoint.record_file import RECORD, read_record
from stageline.checkpoint.write_tensors import TensorType, local_part
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.runtime.optimizers.param_groups import is_on_host


class Loaded(NamedTuple):
    """The step and data that were given to `sl.save`."""

    step: int
    data: Any


OptimizerStates = dict[nn.Parameter, dict[str, Any]]


class LoadTarget(NamedTuple):
    """The pipeline and optimizers that a checkpoint is loaded into."""

    pipe: Pipeline
    optimizers: tuple[Optimizer, ...]
    own: Mapping[str, nn.Parameter]  # the optimized parameters of this process
    optimized: set[str]  # the names of those of all processes


@dataclass(frozen=True)
class PreparedLoad:
    """The changes that a checkpoint makes in this process, checked and ready to apply."""

    record: Record
    reader: TensorReader
    targets: Mapping[str, Tensor]
    random: Tensor
    states: OptimizerStates
    options: Sequence[tuple[Optimizer, list[dict[str, Any]]]]
    schedulers: Sequence[tuple[LRScheduler, dict[str, Any]]]

    @property
    def result(self) -> Loaded:
        return Loaded(self.record.step, from_json(self.record.data))


def load(
    folder: str | os.PathLike[str], pipe: Pipeline, optimizer: Optimizer | None = None
) -> Loaded:
    """Load the latest checkpoint of a folder, or the checkpoint at exactly this path.

    Training then continues with the bits that it would have had without an interruption, on any
    number of ranks. All ranks call it. If a checkpoint is damaged or does not match the pipeline,
    `CheckpointError` is raised on all ranks and nothing is changed.
    """
    return load_if(lambda _: None, folder, pipe, optimizer)


def load_if(
    accept: Callable[[Loaded], None],
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer | None,
) -> Loaded:
    """Load a checkpoint unless `accept` raises an error, before anything is changed."""
    group = checkpoint_group(pipe)
    group.finish_save()
    path = Path(group.run_on_first(lambda: str(folders.find_checkpoint(folder))))
    record = group.run(lambda: _read_record(path))
    optimizers = group.run(lambda: optimizers_of(pipe, optimizer))
    own = group.run(lambda: _own_parameters(pipe, optimizers))
    found = group.gather([list(own), [str(file.crc32) for file in record.files]])
    group.run(lambda: _check_same_files(path, [checksums for _, checksums in found]))
    target = LoadTarget(pipe, optimizers, own, {name for names, _ in found for name in names})
    prepared = group.run(lambda: _prepare(path, record, target))
    group.run(lambda: accept(prepared.result))
    group.run(lambda: _apply(prepared, target))
    return prepared.result


def _read_record(path: Path) -> Record:
    fields = read_record(path)
    try:
        from_json(fields)  # raises if one of the encoded values is malformed
        return Record.of(fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path / RECORD, error) from error


def _own_parameters(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the optimized parameters that layers of this process use, by name."""
    names = tensor_names(pipe)
    for optimizer in optimizers:
        check_parameters(optimizer, names)
    local = {tensor: name for name, tensor in local_tensors(pipe).items()}
    return {local[p]: p for optimizer in optimizers for p in _parameters(optimizer) if p in local}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_same_files(path: Path, checksums: Sequence[list[str]]) -> None:
    if any(each != checksums[0] for each in checksums):
        raise CheckpointError(
            f"{str(path)!r} is not the same on all ranks: load from a folder that all of them share"
        )


def _prepare(path: Path, record: Record, target: LoadTarget) -> PreparedLoad:
    """Check and read everything; allocate no more memory than the files have bytes."""
    pipe, optimizers, own, optimized = target
    checkpoint = Checkpoint(path, record, stored_tensors(path, record.files))
    check_compatible(checkpoint, pipe, optimizers, own, optimized)
    options = [(each, new_options(path, record, each, own)) for each in optimizers]
    schedulers = [(each, new_scheduler_state(path, record, each)) for each in schedulers_of(pipe)]
    reader = TensorReader(checkpoint.stored)
    states = _allocate_states(checkpoint, optimizers, own)
    targets = {f"{MODEL}{name}": tensor for name, tensor in local_tensors(pipe).items()}
    for name, parameter in own.items():
        state = states[parameter].items()
        targets |= {f"{OPTIMIZER}{name}.{key}": t for key, t in state if isinstance(t, Tensor)}
    for name, tensor in targets.items():
        check_writable(name, tensor)
    check_not_copied(pipe)
    random = torch.empty_like(torch.get_rng_state())
    reader.verify({RANDOM: random} | targets)
    reader.copy({RANDOM: random})
    try:
        torch.Generator().set_state(random)
    except RuntimeError as error:
        raise damaged(path, f"{RANDOM} is not the state of a generator, {error}") from error
    return PreparedLoad(record, reader, targets, random, states, options, schedulers)


def _allocate_states(
    checkpoint: Checkpoint, optimizers: Sequence[Optimizer], own: Mapping[str, nn.Parameter]
) -> OptimizerStates:
    """Return a tensor for each saved optimizer state: an existing one where it fits, or new."""
    types = checkpoint.types
    keys: dict[str, list[str]] = {}
    for name in types:
        if name.startswith(OPTIMIZER):
            parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            keys.setdefault(parameter_name, []).append(key)
    groups = {
        p: group for each in optimizers for group in each.param_groups for p in group["params"]
    }
    current = {p: state for each in optimizers for p, state in each.state.items()}
    states: OptimizerStates = {}
    try:
        for name, parameter in own.items():
            states[parameter] = dict(checkpoint.record.values.get(name, {}))
            for key in keys.get(name, []):
                kind = types[f"{OPTIMIZER}{name}.{key}"]
                on_host = is_on_host(key, groups[parameter])
                existing = current.get(parameter, {}).get(key)
                states[parameter][key] = _allocate(kind, existing, parameter, on_host)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} has an optimizer state that does not fit in memory: {error}"
        ) from error
    return states


def _allocate(kind: TensorType, existing: object, parameter: nn.Parameter, on_host: bool) -> Tensor:
    if isinstance(existing, Tensor) and TensorType.of(existing) == kind:
        return existing
    if tuple(parameter.shape) == kind.shape and not on_host:
        return torch.empty_like(parameter, dtype=kind.dtype, requires_grad=False)
    device = torch.device("cpu") if on_host else parameter.device
    return torch.empty(kind.shape, dtype=kind.dtype, device=device)


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that torch cannot write to."""
    here = local_part(tensor)
    strides = zip(here.shape, here.stride(), strict=True)
    is_expanded = any(size > 1 and not stride for size, stride in strides)
    if is_expanded or here.is_inference() or here.is_meta:
        kind = "expanded" if is_expanded else "on the meta device" if here.is_meta else "inference"
        raise CheckpointError(
            f"{name} cannot be loaded into, it is {kind}: make it a plain tensor, with clone()"
        )


def check_not_copied(pipe: Pipeline) -> None:
    """Raise for a layer whose `state_dict` returns copies: values loaded into them are lost."""
    first, second = local_tensors(pipe), local_tensors(pipe)
    for name, tensor in first.items():
        is_copy = name not in second or (
            local_part(tensor).data_ptr() != local_part(second[name]).data_ptr()
        )
        if is_copy:
            raise CheckpointError(
                f"{name} cannot be loaded into: its layer's state_dict returns a copy of it: make "
                "it return the tensor itself"
            )


def _apply(prepared: PreparedLoad, target: LoadTarget) -> None:
    try:
        with torch.no_grad():
            prepared.reader.copy(prepared.targets)
    except (CheckpointError, OSError) as error:  # only what exceeds the cache is read again
        raise CheckpointError(
            f"the checkpoint of step {prepared.record.step} was verified, but then could not be "
            f"read again: {error}; the pipeline now has some old and some new values: load again"
        ) from error
    for optimizer, options in prepared.options:
        parameters = set(_parameters(optimizer))
        for parameter in (p for p in target.own.values() if p in parameters):
            optimizer.state.pop(parameter, None)
            if prepared.states[parameter]:
                optimizer.state[parameter] = prepared.states[parameter]
        for group, values in zip(optimizer.param_groups, options, strict=True):
            for key, value in values.items():
                current = group.get(key)
                group[key] = current.copy_(value) if isinstance(current, Tensor) else value
    for scheduler, state in prepared.schedulers:
        scheduler.load_state_dict(deepcopy(state))
    torch.set_rng_state(prepared.random)
    set_counters(target.pipe, prepared.record.num_steps, prepared.record.seed)
