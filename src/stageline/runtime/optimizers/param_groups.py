"""Properties of any torch optimizer: the options of its groups, and where its states are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

NOT_OPTIONS = ("params", "param_names")  # keys of a parameter group


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, such as its learning rate, as plain values."""
    return {key: _number(value) for key, value in group.items() if key not in NOT_OPTIONS}


def is_on_host(state: str, group: Mapping[str, Any]) -> bool:
    """Return whether a state is on the CPU: the step counter is, unless capturable or fused."""
    return state == "step" and not (group.get("capturable") or group.get("fused"))


def _number(value: Any) -> Any:
    """Return a number for a tensor of one element, as learning rates of compiled optimizers are."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
