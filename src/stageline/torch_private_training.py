"""Private names of torch for loss scaling and sharded weights, as `torch_private.py` has others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PRIVATE_NAMES = ("torch.amp.GradScaler._found_inf_per_device",)


def found_infs(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[Any, Tensor]:
    """Return where `unscale_` has noted, by device, whether a gradient was not finite.

    The public interface only tells by skipping the step, and it is too late then to tell others.
    """
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    return found
