"""sl.load: everything is checked and read before anything is changed.

    find ─► record ─► headers ─► does it fit? ─► checksums of tensors ─► all ranks agree ─► change

What is left to do then cannot fail, or has been tried on a copy.
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
from stageline.checkpoint.fitting import Checkpoint, check, new_options, new_scheduler_state
from stageline.checkpoint.reading import Reader, damaged, saved_in
from stageline.checkpoint.storage import Form
from stageline.checkpoint.values import decode
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.runtime.engine.replicas import local
from stageline.runtime.optimizers.param_groups import is_on_host


class Loaded(NamedTuple):
    """What was saved beside the pipeline and its optimizer."""

    step: int
    data: Any


State = dict[nn.Parameter, dict[str, Any]]  # of an optimizer
Own = Mapping[str, nn.Parameter]  # the optimizers' parameters that layers of this process use


@dataclass(frozen=True)
class Change:
    """What a checkpoint changes in this process, checked and ready."""

    reader: Reader
    targets: Mapping[str, Tensor]
    random: Tensor
    state: State
    options: Sequence[tuple[Optimizer, list[dict[str, Any]]]]
    schedulers: Sequence[tuple[LRScheduler, dict[str, Any]]]
    result: Loaded


def load(
    folder: str | os.PathLike[str], pipe: Pipeline, optimizer: Optimizer | None = None
) -> Loaded:
    """Go on from the newest checkpoint of a folder, or from the one at that very path.

    Training has the bits that it would have had without a stop, on any number of ranks. All ranks
    call it. A checkpoint that is damaged or does not fit is refused, on all ranks, and nothing is
    changed.
    """
    return load_accepted(folder, pipe, optimizer, lambda _: None)


def load_accepted(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer | None,
    accept: Callable[[Loaded], None],
) -> Loaded:
    """Load, unless `accept` raises an error for what was saved; it is asked before any change."""
    desk = desk_of(pipe)
    desk.settle()
    path = Path(desk.by_first(lambda: str(folders.find(folder))))
    record = desk.agreed(lambda: _record(path))
    optimizers = desk.agreed(lambda: optimizers_of(pipe, optimizer))
    own = desk.agreed(lambda: _by_name(pipe, optimizers))
    told = desk.everywhere([list(own), [str(file.crc32) for file in record.files]])
    optimized = {name for names, _ in told for name in names}
    is_same = all(checksums == told[0][1] for _, checksums in told)
    change = desk.agreed(lambda: _prepared(path, record, pipe, optimizers, own, optimized, is_same))
    desk.agreed(lambda: accept(change.result))
    desk.agreed(lambda: _apply(change, pipe, record, own))
    return change.result


def _record(path: Path) -> Record:
    fields = folders.read_record(path)
    try:
        decode(fields)  # all that is encoded in it can be
        return Record.of(fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path / folders.RECORD, error) from error


def _by_name(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    known = {place.tensor: place.name for place in places(pipe)}
    for optimizer in optimizers:
        check_parameters(optimizer, known)
    names = {tensor: name for name, tensor in used_here(pipe).items()}
    return {names[p]: p for optimizer in optimizers for p in _parameters(optimizer) if p in names}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _prepared(
    path: Path,
    record: Record,
    pipe: Pipeline,
    optimizers: Sequence[Optimizer],
    own: Own,
    optimized: set[str],
    is_same: bool,
) -> Change:
    """Check and read everything; memory is taken only for what is in files of that length."""
    if not is_same:
        raise CheckpointError(
            f"{str(path)!r} is not the same on all ranks: load from a folder that all of them share"
        )
    checkpoint = Checkpoint(path, record, saved_in(path, record.files))
    check(checkpoint, pipe, optimizers, own, optimized)
    options = [(each, new_options(checkpoint, each, own)) for each in optimizers]
    schedulers = [
        (each, new_scheduler_state(checkpoint, each))
        for each in (pipe.stepper.schedulers if pipe.stepper else ())
    ]
    reader = Reader(checkpoint.saved)
    try:
        state = _made(checkpoint, optimizers, own)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{str(path)!r} has a state of the optimizer that does not fit in memory: {error}"
        ) from error
    targets = {f"{MODEL}{name}": tensor for name, tensor in used_here(pipe).items()}
    for name, parameter in own.items():
        kept = state[parameter].items()
        targets |= {f"{OPTIMIZER}{name}.{key}": t for key, t in kept if isinstance(t, Tensor)}
    for name, tensor in targets.items():
        _check_writable(name, tensor)
    _check_live(pipe)
    random = torch.empty_like(torch.get_rng_state())
    reader.verify({RANDOM: random} | targets)
    reader.copy({RANDOM: random})
    try:
        torch.Generator().set_state(random)
    except RuntimeError as error:
        raise damaged(path, f"its {RANDOM} is no state of a generator, {error}") from error
    result = Loaded(record.step, decode(record.data))
    return Change(reader, targets, random, state, options, schedulers, result)


def _made(checkpoint: Checkpoint, optimizers: Sequence[Optimizer], own: Own) -> State:
    """Return room for all that the optimizers kept: what they have, or new."""
    forms = checkpoint.forms
    states: dict[str, list[str]] = {}
    for key in forms:
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
            form = forms[f"{OPTIMIZER}{name}.{state}"]
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


def _check_writable(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that torch would refuse to fill."""
    here = local(tensor.detach())
    strides = zip(here.shape, here.stride(), strict=True)
    is_repeated = any(size > 1 and not stride for size, stride in strides)
    if is_repeated or here.is_inference() or here.is_meta:
        kind = "expanded" if is_repeated else "on the meta device" if here.is_meta else "inference"
        raise CheckpointError(
            f"{name} cannot be loaded into, it is {kind}: make it a plain tensor, with clone()"
        )


def _check_live(pipe: Pipeline) -> None:
    """Raise for a layer whose `state_dict` makes copies: what is loaded into these is lost."""
    first, second = used_here(pipe), used_here(pipe)
    for name, tensor in first.items():
        if name not in second or local(tensor).data_ptr() != local(second[name]).data_ptr():
            raise CheckpointError(
                f"{name} cannot be loaded into: its layer's state_dict gives a copy of it: let it "
                "give the tensor itself"
            )


def _apply(change: Change, pipe: Pipeline, record: Record, own: Own) -> None:
    try:
        with torch.no_grad():
            change.reader.copy(change.targets)
    except (CheckpointError, OSError) as error:  # only what was too large to keep is read again
        raise CheckpointError(
            f"the checkpoint of step {record.step} was whole a moment ago, but now: {error}; the "
            "pipeline is part old, part new: load again"
        ) from error
    for optimizer, options in change.options:
        owned = set(_parameters(optimizer))
        for parameter in (p for p in own.values() if p in owned):
            optimizer.state.pop(parameter, None)
            if change.state[parameter]:
                optimizer.state[parameter] = change.state[parameter]
        for group, values in zip(optimizer.param_groups, options, strict=True):
            for key, value in values.items():
                now = group.get(key)
                group[key] = now.copy_(value) if isinstance(now, Tensor) else value
    for scheduler, state in change.schedulers:
        scheduler.load_state_dict(deepcopy(state))
    torch.set_rng_state(change.random)
    pipe.num_steps, pipe.seed = record.num_steps, record.seed
