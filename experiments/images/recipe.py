"""The recipe of Real et al. (arXiv 1802.01548), which GPipe follows, at the size of this machine.

Kept: RMSProp with momentum, label smoothing, an auxiliary head whose loss counts 0.4, weight decay,
an exponential learning rate after a linear warm-up. Left out: dropout of paths and the moving
average of the weights, which help over the paper's hundred epochs and not over one or two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Recipe:
    """What a training depends on beside its model and data."""

    steps: int
    batch_size: int = 64
    num_microbatches: int = 4
    rate: float = 0.2  # the highest; of 0.05, 0.1 and 0.2 its training loss was the lowest
    last_rate: float = 0.02  # as a share of the highest
    warm_up: float = 0.1  # as a share of the steps
    label_smoothing: float = 0.1
    auxiliary_weight: float = 0.4
    weight_decay: float = 4e-5
    cutout: int = 5  # pixels of 14

    def rate_at(self, step: int) -> float:
        """Return the learning rate after `step` steps, as a share of the highest.

        >>> recipe = Recipe(steps=110, last_rate=0.01, warm_up=1 / 11)
        >>> [round(recipe.rate_at(step), 3) for step in (0, 4, 9, 10, 60, 110)]
        [0.1, 0.5, 1.0, 1.0, 0.1, 0.01]
        """
        num_warm_up = max(1, round(self.warm_up * self.steps))
        if step < num_warm_up:
            return (step + 1) / num_warm_up
        done = (step - num_warm_up) / max(1, self.steps - num_warm_up)
        return float(self.last_rate**done)

    def loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Return the head's loss plus a part of that of the auxiliary head."""
        head, auxiliary = (
            cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
            for logits in outputs
        )
        return head + self.auxiliary_weight * auxiliary

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.RMSprop, LambdaLR]:
        """Return the optimizer with its schedule; its epsilon of 1 is that of the reference."""
        optimizer = torch.optim.RMSprop(
            parameters,
            lr=self.rate,
            alpha=0.9,
            eps=1.0,
            momentum=0.9,
            weight_decay=self.weight_decay,
        )
        return optimizer, LambdaLR(optimizer, self.rate_at)
