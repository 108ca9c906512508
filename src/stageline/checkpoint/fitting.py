"""Whether a checkpoint fits a pipeline and its optimizer, from its record and headers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.checkpoint.contents import MODEL, OPTIMIZER, RANDOM, Options, Record, places
from stageline.checkpoint.reading import Saved
from stageline.checkpoint.storage import Form
from stageline.checkpoint.values import decode
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline

NUM_NAMED = 4  # of a list in a message; the rest is counted
# What numbers of these options may be, in all of torch's optimizers. Rates have no lower limit: a
# cosine may end a rounding error below 0.
LIMITS = {
    "lr": (-math.inf, math.inf),
    "momentum": (-math.inf, math.inf),
    "weight_decay": (-math.inf, math.inf),
    "betas": (0.0, 1.0),
    "eps": (0.0, math.inf),
}
FLAGS = ("foreach", "fused")  # options that may be left open, None, as well
BY_GROUP = ("base_lrs", "_last_lr")  # what schedulers keep for each group of the optimizer


class Checkpoint(NamedTuple):
    """One on disk, with nothing read but its record and headers."""

    path: Path
    record: Record
    saved: Mapping[str, Saved]

    @property
    def forms(self) -> dict[str, Form]:
        return {name: tensor.form for name, tensor in self.saved.items()}


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
    wanted = Form.of(torch.get_rng_state())
    if saved.get(RANDOM) != wanted:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} has {saved.get(RANDOM)} for {RANDOM} instead of {wanted}: "
            "load another checkpoint"
        )
    if optimized:
        _check_optimized(checkpoint, optimized)
    for optimizer in optimizers:
        _check_groups(checkpoint, optimizer, own)
        if type(optimizer).__module__.startswith("torch.optim."):
            _check_states(checkpoint, optimizer, own)


def _check_optimized(checkpoint: Checkpoint, optimized: set[str]) -> None:
    listed = [name for group in checkpoint.record.groups for name in group.names]
    _check_names(checkpoint.path, "optimizer", listed, optimized)
    keys = [key.removeprefix(OPTIMIZER) for key in checkpoint.saved if key.startswith(OPTIMIZER)]
    with_state = {key.rpartition(".")[0] for key in keys} | checkpoint.record.values.keys()
    if len(listed) != len(optimized) or not with_state <= optimized:
        raise CheckpointError(
            f"{str(checkpoint.path)!r} has parameters in several groups, or states of parameters "
            "in none: load another checkpoint"
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


def _check_states(
    checkpoint: Checkpoint, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> None:
    """Raise for a state larger than its parameter, as no optimizer of torch's own keeps."""
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    for key, tensor in checkpoint.saved.items():
        name = key.removeprefix(OPTIMIZER).rpartition(".")[0]
        parameter = own.get(name) if key.startswith(OPTIMIZER) else None
        if parameter not in optimized:
            continue
        assert parameter is not None  # it is among them
        if prod(tensor.form.shape) > max(1, parameter.numel()):
            raise CheckpointError(
                f"{str(checkpoint.path)!r} has {tensor.form} for {key}, but the parameter is "
                f"{Form.of(parameter)}: load another checkpoint"
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


def new_options(
    checkpoint: Checkpoint, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Return what each group will be trained with, of the types that its options have now."""
    found = []
    for group, saved in zip(
        optimizer.param_groups, saved_options(checkpoint.record, optimizer, own), strict=True
    ):
        values = {key: decode(value) for key, value in saved[0].values.items()} if saved else {}
        found.append(
            {
                key: _fitted(value, group.get(key), f"the optimizer's {key}", checkpoint.path)
                for key, value in values.items()
            }
        )
        if any(values.get(key) not in (None, False, True) for key in FLAGS):
            raise CheckpointError(
                f"{str(checkpoint.path)!r} has options of the optimizer that are no flags, but "
                f"{' and '.join(FLAGS)} are: load another checkpoint"
            )
        for key, limits in LIMITS.items():
            _check_limits(values.get(key), limits, f"the optimizer's {key}", checkpoint.path)
    return found


def new_scheduler_state(checkpoint: Checkpoint, scheduler: LRScheduler) -> dict[str, Any]:
    """Return a state that this scheduler takes without a fault: a copy of it did."""
    saved, kind = checkpoint.record.scheduler, type(scheduler).__name__
    if saved is None or saved.kind != kind:
        before = "without a scheduler" if saved is None else f"with {saved.kind}"
        raise CheckpointError(
            f"{str(checkpoint.path)!r} was saved {before}, but the pipeline has {kind}: build it "
            "as it was, or load another"
        )
    return tried_state(decode(saved.state), scheduler, checkpoint.path)


def tried_state(saved: Any, scheduler: LRScheduler, path: Path) -> dict[str, Any]:
    """Return a scheduler's state in the types that it has, if a copy of the scheduler takes it."""
    kind = type(scheduler).__name__
    state = _fitted(saved, scheduler.state_dict(), "the scheduler's state", path)
    try:
        with _kept(scheduler.optimizer):
            copied = deepcopy(scheduler, {id(scheduler.optimizer): scheduler.optimizer})
            copied.load_state_dict(deepcopy(state))
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} has a state that {kind} does not take: {type(error).__name__}: {error}"
        ) from error
    return dict(state)


@contextmanager
def _kept(optimizer: Optimizer) -> Iterator[None]:
    """Put an optimizer's options back, should the copy of a scheduler have reached them."""
    before = [dict(group) for group in optimizer.param_groups]
    tensors = {
        value: value.clone()
        for group in before
        for value in group.values()
        if isinstance(value, Tensor)
    }
    try:
        yield
    finally:
        for group, options in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(options)
        for tensor, value in tensors.items():
            tensor.copy_(value)


def _fitted(value: Any, now: object, what: str, path: Path) -> Any:
    """Return a saved value in the type of the one that is there, if it is of that kind."""
    if now is None:
        return value
    if isinstance(now, dict):
        if isinstance(value, dict) and (isinstance(now, Counter) or now.keys() <= value.keys()):
            new = 0 if isinstance(now, Counter) else None
            items = {k: _fitted(v, now.get(k, new), f"{what}, {k}", path) for k, v in value.items()}
            return Counter(items) if isinstance(now, Counter) else items
    elif isinstance(now, list | tuple):
        if isinstance(value, list | tuple) and len(value) == len(now):
            pairs = zip(value, now, strict=True)
            return type(value)(_fitted(a, b, what, path) for a, b in pairs)
        if isinstance(value, list) and isinstance(now, list) and not what.endswith(BY_GROUP):
            return value  # a history, perhaps
    elif _is_alike(value, now):
        return torch.full_like(now, value) if isinstance(now, Tensor) else value
    raise CheckpointError(
        f"{str(path)!r} has {_short(value)} for {what}, where {_short(now)} is now: build what was "
        "saved, or load another checkpoint"
    )


def _is_alike(value: object, now: object) -> bool:
    """Whether one may stand for the other. Flags may be left open, numbers may not."""
    if isinstance(now, Tensor):
        return now.numel() == 1 and _is_number(value)
    if _is_number(now):
        return _is_number(value)
    return value is None or isinstance(value, str if isinstance(now, str) else type(now))


def _check_limits(value: Any, limits: tuple[float, float], what: str, path: Path) -> None:
    for number in value if isinstance(value, list | tuple) else [value]:
        if _is_number(number) and not (math.isfinite(number) and limits[0] <= number <= limits[1]):
            raise CheckpointError(
                f"{str(path)!r} has {number} for {what}, but it has to be finite and from "
                f"{limits[0]} to {limits[1]}: load another checkpoint"
            )


def _is_number(value: object) -> bool:
    """Whether it is one that torch can work with: integers are not longer than a word."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, float) or -(2**63) <= cast("int", value) < 2**63)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:50]}…"


def _listed(names: list[str]) -> str:
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
