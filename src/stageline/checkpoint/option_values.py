"""Convert saved optimizer options and scheduler states to the types that are now in use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.checkpoint.json_values import from_json
from stageline.checkpoint.record import GroupOptions, Record
from stageline.errors import CheckpointError

# The valid range of these options in all of torch's optimizers. Rates have no lower limit: a cosine
# schedule may end a rounding error below 0.
LIMITS = {
    "lr": (-math.inf, math.inf),
    "momentum": (-math.inf, math.inf),
    "weight_decay": (-math.inf, math.inf),
    "betas": (0.0, 1.0),
    "eps": (0.0, math.inf),
}
FLAGS = ("foreach", "fused")  # options that may also be None
BY_GROUP = ("base_lrs", "_last_lr")  # lists in schedulers with an item per parameter group


def saved_groups(
    record: Record, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> list[list[GroupOptions]]:
    """Return for each group of the optimizer the saved groups of its parameters in this process."""
    numbers = {name: i for i, group in enumerate(record.groups) for name in group.names}
    names = {parameter: name for name, parameter in own.items()}
    rows = [
        sorted({numbers[names[p]] for p in group["params"] if p in names})
        for group in optimizer.param_groups
    ]
    return [[record.groups[i] for i in row] for row in rows]


def new_options(
    path: Path, record: Record, optimizer: Optimizer, own: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the saved options of each group in the types that they have in the optimizer."""
    found = []
    saved = saved_groups(record, optimizer, own)
    for group, origins in zip(optimizer.param_groups, saved, strict=True):
        encoded = origins[0].values if origins else {}
        values = {key: from_json(value) for key, value in encoded.items()}
        found.append(
            {
                key: _convert(value, group.get(key), f"the optimizer's {key}", path)
                for key, value in values.items()
            }
        )
        for key in FLAGS:
            if values.get(key) not in (None, False, True):
                raise CheckpointError(
                    f"{str(path)!r} has {_short(values[key])} for the optimizer's {key}, but it "
                    "must be True, False or None: load another checkpoint"
                )
        for key, limits in LIMITS.items():
            _check_limits(values.get(key), limits, f"the optimizer's {key}", path)
    return found


def new_scheduler_state(path: Path, record: Record, scheduler: LRScheduler) -> dict[str, Any]:
    """Return the saved state, after a copy of the scheduler has loaded it without an error."""
    saved, kind = record.scheduler, type(scheduler).__name__
    if saved is None or saved.kind != kind:
        before = "without a scheduler" if saved is None else f"with {saved.kind}"
        raise CheckpointError(
            f"{str(path)!r} was saved {before}, but the pipeline has {kind}: build the pipeline "
            "that was saved, or load another checkpoint"
        )
    return try_scheduler_state(from_json(saved.state), scheduler, path)


def try_scheduler_state(saved: Any, scheduler: LRScheduler, path: Path) -> dict[str, Any]:
    """Return a scheduler's state in the right types, after a copy of the scheduler loaded it."""
    kind = type(scheduler).__name__
    state = _convert(saved, scheduler.state_dict(), "the scheduler's state", path)
    try:
        with _restored_options(scheduler.optimizer):
            copied = deepcopy(scheduler, {id(scheduler.optimizer): scheduler.optimizer})
            copied.load_state_dict(deepcopy(state))
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} has a state that {kind} cannot load: {type(error).__name__}: {error}"
        ) from error
    return dict(state)


@contextmanager
def _restored_options(optimizer: Optimizer) -> Iterator[None]:
    """Restore an optimizer's options in case the copy of a scheduler has changed them."""
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


def _convert(value: Any, current: object, what: str, path: Path) -> Any:
    """Return a saved value in the type of the current one; raise if it is of another kind."""
    if current is None:
        return value
    if isinstance(current, dict):
        is_counter = isinstance(current, Counter)
        if isinstance(value, dict) and (is_counter or current.keys() <= value.keys()):
            missing = 0 if is_counter else None
            items = {
                key: _convert(item, current.get(key, missing), f"{what}, {key}", path)
                for key, item in value.items()
            }
            return Counter(items) if is_counter else items
    elif isinstance(current, list | tuple):
        if isinstance(value, list | tuple) and len(value) == len(current):
            pairs = zip(value, current, strict=True)
            return type(value)(_convert(a, b, what, path) for a, b in pairs)
        if isinstance(value, list) and isinstance(current, list) and not what.endswith(BY_GROUP):
            return value  # a history, perhaps, whose length may differ
    elif _is_same_kind(value, current):
        return torch.full_like(current, value) if isinstance(current, Tensor) else value
    raise CheckpointError(
        f"{str(path)!r} has {_short(value)} for {what}, which is now {_short(current)}: build the "
        "pipeline and optimizer that were saved, or load another checkpoint"
    )


def _is_same_kind(value: object, current: object) -> bool:
    """Return whether one may replace the other. Flags may be None, numbers may not."""
    if isinstance(current, Tensor):
        return current.numel() == 1 and _is_number(value)
    if _is_number(current):
        return _is_number(value)
    return value is None or isinstance(value, str if isinstance(current, str) else type(current))


def _check_limits(value: Any, limits: tuple[float, float], what: str, path: Path) -> None:
    for number in value if isinstance(value, list | tuple) else [value]:
        if _is_number(number) and not (math.isfinite(number) and limits[0] <= number <= limits[1]):
            raise CheckpointError(
                f"{str(path)!r} has {number} for {what}, but it must be finite and from "
                f"{limits[0]} to {limits[1]}: load another checkpoint"
            )


def _is_number(value: object) -> bool:
    """Return whether torch can use the number: integers must fit in 64 bits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, float) or -(2**63) <= cast("int", value) < 2**63)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:50]}…"
