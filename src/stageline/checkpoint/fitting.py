"""Whether a checkpoint fits a pipeline and its optimizer, from the headers of its files alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from stageline.checkpoint.contents import MODEL, RANDOM, Options, Record, places
from stageline.checkpoint.storage import Form
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline

NUM_NAMED = 4  # of a list in a message; the rest is counted


class Checkpoint(NamedTuple):
    """One on disk, with nothing read but what it holds."""

    path: Path
    record: Record
    forms: Mapping[str, Form]


def check(
    checkpoint: Checkpoint,
    pipe: Pipeline,
    optimizers: Sequence[Optimizer],
    own: Mapping[str, nn.Parameter],
    optimized: set[str],
) -> None:
    saved = checkpoint.forms
    model = {p.name: Form.of(p.tensor) for p in places(pipe)}
    found = {name.removeprefix(MODEL): saved[name] for name in saved if name.startswith(MODEL)}
    _check_names(checkpoint.path, "model", found.keys(), model.keys())
    differing = [
        f"{name} is {found[name]} instead of {model[name]}"
        for name in model
        if found[name] != model[name]
    ]
    if differing:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} does not fit the model: {_listed(differing)}: build the "
            "model that was saved"
        )
    if RANDOM not in saved:
        raise CheckpointError(f"{str(checkpoint.path)!r} lacks {RANDOM}: load another checkpoint")
    if optimized:
        names = {name for group in checkpoint.record.groups for name in group.names}
        _check_names(checkpoint.path, "optimizer", names, optimized)
    for optimizer in optimizers:
        _check_groups(checkpoint, optimizer, own)
    if pipe.stepper and pipe.stepper.schedulers and checkpoint.record.scheduler is None:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} was saved without a scheduler, but the pipeline has one: "
            "build it without, or load another"
        )


def _check_names(path: Path, whose: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    missing, extra = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
    parts = [f"lacks {_listed(missing)}"] * bool(missing)
    parts += [f"has {_listed(extra)} too"] * bool(extra)
    if parts:
        raise CheckpointError(
            f"{str(path)!r} {' and '.join(parts)}, but the {whose}'s tensors have to be those that "
            f"were saved: build the same {whose}"
            + (", or load without one" if whose == "optimizer" else "")
        )


def _check_groups(
    checkpoint: Checkpoint, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> None:
    kind = type(optimizer).__name__
    for number, groups in enumerate(saved_options(checkpoint.record, optimizer, own)):
        for group in groups:
            if group.kind != kind:
                raise CheckpointError(
                    f"{str(checkpoint.path)!r} is of {group.kind}, but the optimizer is {kind}: "
                    "use the same, or load without one"
                )
        if len(groups) > 1:
            raise CheckpointError(
                f"the optimizer's group {number} has {groups[0].names[0]} and "
                f"{groups[1].names[0]}, but they were saved with different options: put them into "
                "different groups, as before"
            )


def saved_options(
    record: Record, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> list[list[Options]]:
    """For each group of the optimizer, those that its parameters of this process were saved in."""
    numbers = {name: i for i, group in enumerate(record.groups) for name in group.names}
    names = {parameter: name for name, parameter in own.items()}
    rows = [
        sorted({numbers[names[p]] for p in group["params"] if p in names})
        for group in optimizer.param_groups
    ]
    return [[record.groups[i] for i in row] for row in rows]


def _listed(names: list[str]) -> str:
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
