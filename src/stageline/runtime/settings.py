"""The settings of a pipeline, as its user chose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stageline.model.own_loss import own_loss
from stageline.runtime.exactness.gradient_types import EXACT
from stageline.runtime.optimizers.stage_optimizers import OptimizerFunction, SchedulerFunction

LossFunction = Callable[[Any, Any], Tensor]
CountFunction = Callable[[Any], float | Tensor]


@dataclass(frozen=True)
class Settings:
    """The settings of a pipeline that do not depend on where its layers are."""

    loss_fn: LossFunction
    recompute: tuple[str, ...]  # by stage
    count_fn: CountFunction | None = None
    optimizer_fn: OptimizerFunction | None = None
    scheduler_fn: SchedulerFunction | None = None
    max_norm: float | None = None
    batch_norm: str = "minibatch"
    accumulate: str | torch.dtype = EXACT
    embedding_rows: bool = True
    offload: bool = False

    @property
    def has_own_loss(self) -> bool:
        """Return whether the model computes its loss itself."""
        return self.loss_fn is own_loss
