"""What is known of any torch optimizer: its groups' options, and where it counts its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

NOT_OPTIONS = ("params", "param_names")  # of a parameter group


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What the parameters of a group are trained with, as plain values."""
    return {key: _number(value) for key, value in group.items() if key not in NOT_OPTIONS}


def is_on_host(state: str, group: Mapping[str, Any]) -> bool:
    """Steps are counted on the CPU, unless the optimizer runs in one kernel or graph."""
    return state == "step" and not (group.get("capturable") or group.get("fused"))


def _number(value: Any) -> Any:
    """A rate may be a tensor, so that compiled optimizers can follow it."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
