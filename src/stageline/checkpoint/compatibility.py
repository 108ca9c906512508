"""Refuse a checkpoint that does not match the pipeline and its optimizer.

Only the record and the headers of the files are needed for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from stageline.checkpoint.option_values import saved_groups
from stageline.checkpoint.pipeline_state import MODEL, OPTIMIZER, RANDOM, model_tensors
from stageline.checkpoint.read_tensors import StoredTensor
from stageline.checkpoint.record import Record
from stageline.checkpoint.write_tensors import TensorType
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline

MAX_LISTED = 4  # items of a list in an error; the others are counted


class Checkpoint(NamedTuple):
    """A checkpoint on disk of which only the record and the headers were read."""

    path: Path
    record: Record
    stored: Mapping[str, StoredTensor]

    @property
    def types(self) -> dict[str, TensorType]:
        return {name: tensor.type for name, tensor in self.stored.items()}


def check_compatible(
    checkpoint: Checkpoint,
    pipe: Pipeline,
    optimizers: Sequence[Optimizer],
    own: Mapping[str, nn.Parameter],
    optimized: set[str],
) -> None:
    """Raise `CheckpointError` if the checkpoint cannot be loaded into the pipeline.

    `own` are the optimized parameters of this process, `optimized` the names of all of them.
    """
    _check_model(checkpoint, pipe)
    _check_random_state(checkpoint)
    if optimized:
        _check_optimized(checkpoint, optimized)
    for optimizer in optimizers:
        _check_groups(checkpoint, optimizer, own)
        if type(optimizer).__module__.startswith("torch.optim."):
            _check_states(checkpoint, optimizer, own)


def _check_model(checkpoint: Checkpoint, pipe: Pipeline) -> None:
    types = checkpoint.types
    model = {each.name: TensorType.of(each.tensor) for each in model_tensors(pipe)}
    found = {name.removeprefix(MODEL): types[name] for name in types if name.startswith(MODEL)}
    _check_names(checkpoint.path, "model", found.keys(), model.keys())
    differing = [
        f"{name} is {found[name]} instead of {model[name]}"
        for name in model
        if found[name] != model[name]
    ]
    if differing:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} does not match the model: {listed(differing)}: build the "
            "model that was saved"
        )


def _check_random_state(checkpoint: Checkpoint) -> None:
    found, expected = checkpoint.types.get(RANDOM), TensorType.of(torch.get_rng_state())
    if found != expected:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} has {found} for {RANDOM} instead of {expected}: load "
            "another checkpoint"
        )


def _check_optimized(checkpoint: Checkpoint, optimized: set[str]) -> None:
    listed = [name for group in checkpoint.record.groups for name in group.names]
    _check_names(checkpoint.path, "optimizer", listed, optimized)
    keys = [key.removeprefix(OPTIMIZER) for key in checkpoint.stored if key.startswith(OPTIMIZER)]
    with_state = {key.rpartition(".")[0] for key in keys} | checkpoint.record.values.keys()
    if len(listed) != len(optimized) or not with_state <= optimized:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} has a parameter in several groups, or the state of a "
            "parameter that is in no group: load another checkpoint"
        )


def _check_names(path: Path, whose: str, found: Iterable[str], expected: Iterable[str]) -> None:
    missing, extra = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    parts = [f"lacks {listed(missing)}"] * bool(missing)
    parts += [f"has the additional {listed(extra)}"] * bool(extra)
    if parts:
        raise CheckpointError(
            f"{str(path)!r} {' and '.join(parts)}, but the {whose}'s tensors must be those that "
            f"were saved: build the same {whose}"
            + (", or load without an optimizer" if whose == "optimizer" else "")
        )


def _check_groups(
    checkpoint: Checkpoint, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> None:
    kind = type(optimizer).__name__
    for number, groups in enumerate(saved_groups(checkpoint.record, optimizer, own)):
        for group in groups:
            if group.kind != kind:
                raise CheckpointError(
                    f"{str(checkpoint.path)!r} was saved with {group.kind}, but the optimizer is "
                    f"{kind}: use {group.kind}, or load without an optimizer"
                )
        if len(groups) > 1:
            raise CheckpointError(
                f"the optimizer's group {number} has {groups[0].names[0]} and "
                f"{groups[1].names[0]}, but they were saved with different options: put them into "
                "different groups"
            )


def _check_states(
    checkpoint: Checkpoint, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> None:
    """Raise for a state larger than its parameter; no optimizer of torch has such a state."""
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    for key, kind in checkpoint.types.items():
        name = key.removeprefix(OPTIMIZER).rpartition(".")[0]
        parameter = own.get(name) if key.startswith(OPTIMIZER) else None
        if parameter is None or parameter not in optimized:
            continue
        if prod(kind.shape) > max(1, parameter.numel()):
            raise CheckpointError(
                f"{str(checkpoint.path)!r} has {kind} for {key}, but the parameter is "
                f"{TensorType.of(parameter)}: load another checkpoint"
            )


def listed(names: list[str]) -> str:
    rest = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
