"""A watch on asynchronous training: gradients of old weights can drive weights apart.

The papers have none. Here the loss and the size of every stage's updates are held against what they
were: a warning comes when one is not finite, or far above its median, or a step was left out.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from stageline.runtime.peers import Told

MEMORY = 20  # steps that a median is taken of
FEW = 5  # steps that it needs
FAR = 10.0  # times the median; warm-ups of learning rates and noise stay below


class Guard:
    """State: what was seen of the last steps, and whether a warning was given."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=MEMORY)
        self.norms: dict[int, deque[float]] = {}
        self.has_warned = False

    def look(self, number: int, told: Told) -> str | None:
        """What is wrong with a step, said once."""
        found = self._skipped(told) or self._loss(told) or self._norms(told)
        if found is None or self.has_warned:
            return None
        self.has_warned = True
        return (
            f"step {number}: {found}; training may diverge, as gradients of old weights make it "
            "more prone to: use a smaller learning rate, or a synchronous schedule"
        )

    def _skipped(self, told: Told) -> str | None:
        stages = [str(stage) for stage, update in told.updates.items() if update.is_skipped]
        if not stages:
            return None
        return f"gradients are not finite on stage {', '.join(stages)}, which left the step out"

    def _loss(self, told: Told) -> str | None:
        loss = math.fsum(float(loss) * weight for loss, weight in told.losses)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return _far("the loss", loss, self.losses)

    def _norms(self, told: Told) -> str | None:
        found = [
            _far(f"the update of stage {stage}", update.norm, self.norms.setdefault(stage, _new()))
            for stage, update in told.updates.items()
            if not update.is_skipped
        ]
        return next((text for text in found if text), None)


def _new() -> deque[float]:
    return deque(maxlen=MEMORY)


def _far(what: str, value: float, before: deque[float]) -> str | None:
    usual = median(before) if len(before) >= FEW else math.inf
    before.append(value)
    if value <= FAR * usual or usual <= 0.0:
        return None
    return f"{what} is {value:.3g}, against {usual:.3g} in the median of the steps before"
