"""sl.load: everything is checked from the files' headers before the first tensor is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stageline.checkpoint import folder as folders
from stageline.checkpoint.contents import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    Record,
    check_parameters,
    optimizers_of,
    places,
    used_here,
)
from stageline.checkpoint.desk import desk_of
from stageline.checkpoint.fitting import Checkpoint, check, saved_options
from stageline.checkpoint.storage import Form, forms, read
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.runtime.optimizer_groups import is_on_host


class Loaded(NamedTuple):
    """What was saved beside the pipeline and its optimizer."""

    step: int
    data: Any


State = dict[nn.Parameter, dict[str, Any]]  # of an optimizer


def load(
    folder: str | os.PathLike[str], pipe: Pipeline, optimizer: Optimizer | None = None
) -> Loaded:
    """Go on from the newest checkpoint of a folder, or from the one at that very path.

    Training has the bits that it would have had without a stop, on any number of ranks. All ranks
    call it. A checkpoint that does not fit is refused, and nothing is changed.
    """
    desk = desk_of(pipe)
    desk.settle()
    path = desk.by_first(lambda: folders.find(folder))
    checkpoint = desk.agreed(lambda: _opened(path))
    optimizers = desk.agreed(lambda: optimizers_of(pipe, optimizer))
    own = desk.agreed(lambda: _by_name(pipe, optimizers))
    optimized = {name for names in desk.everywhere(list(own)) for name in names}
    desk.agreed(lambda: check(checkpoint, pipe, optimizers, own, optimized))
    state = _made(checkpoint, optimizers, own)
    desk.agreed(lambda: _read(checkpoint, pipe, own, state))
    for each in optimizers:
        _apply(checkpoint.record, each, own, state)
    for scheduler in pipe.stepper.schedulers if pipe.stepper else ():
        scheduler.load_state_dict(checkpoint.record.scheduler)
    pipe.num_steps, pipe.seed = checkpoint.record.num_steps, checkpoint.record.seed
    return Loaded(checkpoint.record.step, checkpoint.record.data)


def _opened(path: Path) -> Checkpoint:
    try:
        record = Record.of(folders.read_record(path))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} has a record that lacks {error}") from error
    found = forms(path)
    if len(found) != record.num_tensors:
        raise CheckpointError(
            f"{str(path)!r} has {len(found)} tensors, but {record.num_tensors} were saved: a file "
            "is missing, or is not of sl.save: load another checkpoint by its path"
        )
    return Checkpoint(path, record, found)


def _by_name(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The optimizers' parameters that layers of this process use."""
    known = {place.tensor: place.name for place in places(pipe)}
    for optimizer in optimizers:
        check_parameters(optimizer, known)
    names = {tensor: name for name, tensor in used_here(pipe).items()}
    return {names[p]: p for optimizer in optimizers for p in _parameters(optimizer) if p in names}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _made(
    checkpoint: Checkpoint, optimizers: Sequence[Optimizer], own: Mapping[str, nn.Parameter]
) -> State:
    """Room for all that the optimizers kept: what they have, or new."""
    states: dict[str, list[str]] = {}
    for key in checkpoint.forms:
        if key.startswith(OPTIMIZER):
            name, _, state = key.removeprefix(OPTIMIZER).rpartition(".")
            states.setdefault(name, []).append(state)
    groups = {
        p: group for each in optimizers for group in each.param_groups for p in group["params"]
    }
    kept = {p: state for each in optimizers for p, state in each.state.items()}
    made: State = {}
    for name, parameter in own.items():
        now = kept.get(parameter, {})
        made[parameter] = dict(checkpoint.record.values.get(name, {}))
        for state in states.get(name, []):
            form = checkpoint.forms[f"{OPTIMIZER}{name}.{state}"]
            on_host = is_on_host(state, groups[parameter])
            made[parameter][state] = _room(form, now.get(state), parameter, on_host)
    return made


def _room(form: Form, now: object, parameter: nn.Parameter, on_host: bool) -> Tensor:
    if isinstance(now, Tensor) and Form.of(now) == form:
        return now
    if tuple(parameter.shape) == form.shape and not on_host:
        return torch.empty_like(parameter, dtype=form.dtype, requires_grad=False)
    device = torch.device("cpu") if on_host else parameter.device
    return torch.empty(form.shape, dtype=form.dtype, device=device)


def _read(
    checkpoint: Checkpoint, pipe: Pipeline, own: Mapping[str, nn.Parameter], state: State
) -> None:
    """From the files into the tensors; every rank for itself."""
    random = torch.empty_like(torch.get_rng_state())
    targets = {f"{MODEL}{name}": tensor.detach() for name, tensor in used_here(pipe).items()}
    for name, parameter in own.items():
        kept = state[parameter].items()
        targets |= {f"{OPTIMIZER}{name}.{key}": t for key, t in kept if isinstance(t, Tensor)}
    targets[RANDOM] = random
    read(checkpoint.path, targets)
    torch.set_rng_state(random)


def _apply(
    record: Record, optimizer: Optimizer, own: Mapping[str, nn.Parameter], state: State
) -> None:
    owned = set(_parameters(optimizer))
    for parameter in (p for p in own.values() if p in owned):
        optimizer.state.pop(parameter, None)
        if state[parameter]:
            optimizer.state[parameter] = state[parameter]
    found = saved_options(record, optimizer, own)
    for group, saved in zip(optimizer.param_groups, found, strict=True):
        for key, value in saved[0].values.items() if saved else ():
            group[key] = _as_it_was(value, group.get(key))


def _as_it_was(value: Any, now: object) -> Any:
    """JSON has no tuples and no tensors."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    return tuple(value) if isinstance(value, list) else value
