"""The results of a step, beside the gradients in the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from stageline.arguments import RenamedAttribute
from stageline.runtime.backends.backend import Collectives, Group
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.exactness.gradient_types import FLOATING_TYPES
from stageline.runtime.optimizers.stage_optimizers import Update
from stageline.schedules.schedule import Schedule


class Loss(NamedTuple):
    """The loss of one micro-batch, and its weight in the mini-batch."""

    loss: Tensor
    weight: float


class Results(NamedTuple):
    """The losses and updates of a step."""

    losses: list[Loss]  # by micro-batch
    updates: dict[int, Update]  # by stage, if the pipeline steps the optimizer


@dataclass(frozen=True)
class StepResult:
    """The losses and updates of one mini-batch.

    With several processes, reading any of them waits for all ranks; nothing waits before.
    """

    fetch: Callable[[], Results] = field(repr=False)

    @cached_property
    def results(self) -> Results:
        return self.fetch()

    told = RenamedAttribute("results")

    @property
    def losses(self) -> list[Loss]:
        """Return the loss of each micro-batch."""
        return self.results.losses

    @property
    def loss(self) -> Tensor:
        """Return the loss of the mini-batch: the mean over its samples."""
        return torch.stack([loss * weight for loss, weight in self.losses]).sum()

    @property
    def skipped(self) -> tuple[int, ...]:
        """Return the stages that made no step, because gradients were not finite."""
        return tuple(stage for stage, update in self.results.updates.items() if update.is_skipped)

    @property
    def redone(self) -> tuple[int, ...]:
        """Return the stages that took a step back and made it again, with clipped gradients."""
        return tuple(stage for stage, update in self.results.updates.items() if update.is_redone)

    @property
    def update_norms(self) -> dict[int, float]:
        """Return how far each stage's weights moved; of gradients where that is not measured."""
        return {stage: float(update.norm) for stage, update in self.results.updates.items()}


def broadcast_results(
    minibatch: MiniBatch, schedule: Schedule, collectives: Collectives
) -> StepResult:
    """Send this process's results to all others, to be awaited when they are read.

    Each number is sent by one process and 0 by all others, which changes no bit of it.
    """
    if collectives.size(Group.EVERYONE) == 1:
        own = _own_results(minibatch)
        return StepResult(lambda: own)
    num_losses = collectives.num_replicas * schedule.num_microbatches
    width = num_losses + schedule.num_stages
    table = torch.zeros(3, width, dtype=torch.float64, device=collectives.device)
    if collectives.is_first_part:
        first = collectives.replica * schedule.num_microbatches
        for i, loss in minibatch.losses.items():
            kind = 1.0 + FLOATING_TYPES.index(loss.dtype)
            _write(table[:, first + i], loss.reshape(()), minibatch.targets[i].weight, kind)
        if collectives.replica == 0 and collectives.is_first_sibling:
            for stage, update in minibatch.updates.items():
                flags = update.is_skipped + 2.0 * update.is_redone
                _write(table[:, num_losses + stage], update.norm, flags, 1.0)
    arrive = collectives.all_reduce(table, "losses", Group.EVERYONE)
    return StepResult(lambda: _read(arrive(), num_losses))


def _write(column: Tensor, *facts: Tensor | float) -> None:
    """Write numbers into a column; no host waits for one that is on a device."""
    for number, fact in enumerate(facts):
        column[number] = fact


def _own_results(minibatch: MiniBatch) -> Results:
    losses = [
        Loss(minibatch.losses[i], target.weight) for i, target in enumerate(minibatch.targets)
    ]
    return Results(losses, dict(sorted(minibatch.updates.items())))


def _read(table: Tensor, num_losses: int) -> Results:
    rows = table.t().tolist()
    losses = [
        Loss(torch.tensor(loss, dtype=FLOATING_TYPES[int(kind) - 1]), weight)
        for loss, weight, kind in rows[:num_losses]
        if kind
    ]
    updates = {
        stage: Update(flags in (1, 3), norm, flags in (2, 3))
        for stage, (norm, flags, is_there) in enumerate(rows[num_losses:])
        if is_there
    }
    return Results(losses, updates)
