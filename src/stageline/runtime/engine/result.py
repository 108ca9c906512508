"""What a step gives back, beside the gradients in the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from stageline.runtime.backends.processes.collectives import Loss, Told


@dataclass(frozen=True)
class StepResult:
    """Of one mini-batch.

    With several processes it is waited for when something of it is read, and not before.
    """

    fetch: Callable[[], Told] = field(repr=False)

    @cached_property
    def told(self) -> Told:
        return self.fetch()

    @property
    def losses(self) -> list[Loss]:
        """By micro-batch."""
        return self.told.losses

    @property
    def loss(self) -> Tensor:
        """The loss of the mini-batch: the mean over its samples."""
        return torch.stack([loss * weight for loss, weight in self.losses]).sum()

    @property
    def skipped(self) -> tuple[int, ...]:
        """The stages that made no step, because their gradients were not finite."""
        return tuple(stage for stage, update in self.told.updates.items() if update.is_skipped)

    @property
    def redone(self) -> tuple[int, ...]:
        """The stages that took a step back and made it again, with gradients that were clipped."""
        return tuple(stage for stage, update in self.told.updates.items() if update.is_redone)

    @property
    def update_norms(self) -> dict[int, float]:
        """By stage, how far its weights moved; of gradients where that is not watched."""
        return {stage: update.norm for stage, update in self.told.updates.items()}
