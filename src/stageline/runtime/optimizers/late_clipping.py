"""Clipping that costs no barrier: step first, look at the norm of all gradients after.

Each rank tells the others the norms of its gradients, and steps as if nothing had to be clipped. It
looks at what they told before the first backward of the next mini-batch. In the rare case that the
norm was too large it takes its step back, clips, steps again, and runs the forwards again that it
has begun since (Zero Bubble calls this post-validation, arXiv 2401.10241):

    rank 0 │ … W6 W7 step F8 F9 F10 ─ look ─ B8 …                  all was well
    rank 0 │ … W6 W7 step F8 F9 F10 ─ look ─ undo, clip, step F8 F9 F10 B8 …

A rank whose own gradients are too large already does not guess, but waits. So the gradients of a
step that is taken back are moderate, and what arithmetic brings back is good to the last digits.
Such a rank repeats its forwards as well: what they read came from ranks that did guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stageline.runtime.optimizers.stage_optimizers import StageOptimizer, Update
from stageline.runtime.optimizers.undo import UndoRecord, prepare_undo, undo

Norms = dict[int, Tensor]  # of gradients, by the number of the parameter in the model


class LateClipping:
    """State: by stage, what is needed to take back a step that was not looked at yet."""

    def __init__(
        self,
        own: Mapping[int, StageOptimizer | None],
        numbers: Mapping[nn.Parameter, int],
        max_norm: float,
        at_work: Callable[[Optimizer], AbstractContextManager[None]],
    ) -> None:
        self.own = {stage: each for stage, each in own.items() if each is not None}
        self.numbers, self.max_norm, self.at_work = numbers, max_norm, at_work
        self.guessed: dict[int, UndoRecord] = {}

    def norms(self, stages: Iterable[int]) -> Norms:
        return {
            self.numbers[parameter]: norm_of(parameter.grad)
            for stage in stages
            if stage in self.own
            for parameter in self.own[stage].parameters
            if parameter.grad is not None
        }

    def guess(self, stages: Sequence[int], own: Norms) -> bool:
        """Step, unless these stages' own gradients tell already that they are to be clipped."""
        if clip_factor(list(own.values()), self.max_norm) != 1.0:
            return False
        for stage in stages:
            if stage in self.own:
                self.guessed[stage] = prepare_undo(self.own[stage].optimizer)
                self._step(self.own[stage])
        return True

    def settle(self, stages: Sequence[int], everywhere: Norms) -> tuple[Update, bool]:
        """With the norms of all ranks: what became of the step, and whether a guess was wrong."""
        norms = [everywhere[number] for number in sorted(everywhere)]
        total = total_norm(norms)
        factor = clip_factor(norms, self.max_norm)
        is_clipped = bool(factor != 1.0)
        was_guessed = any(stage in self.guessed for stage in stages)
        if is_clipped or not was_guessed:
            for stage in stages:
                if stage in self.own:
                    self._again(stage, factor)
        for stage in stages:
            if stage in self.own:
                self.guessed.pop(stage, None)
                self.own[stage].after_step()
        is_skipped = not math.isfinite(total)
        return Update(is_skipped, float(total), was_guessed and is_clipped), is_clipped

    def _again(self, stage: int, factor: Tensor) -> None:
        """Clipped, or not at all if something is not finite anywhere."""
        own = self.own[stage]
        if stage in self.guessed:
            undo(own.optimizer, self.guessed[stage])
        if math.isfinite(factor):
            for parameter in own.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            self._step(own)

    def _step(self, own: StageOptimizer) -> None:
        with self.at_work(own.optimizer):
            own.optimizer.step()


def total_norm(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def clip_factor(norms: list[Tensor], max_norm: float) -> Tensor:
    """What gradients are scaled by, as torch.nn.utils does; not finite if they are not."""
    total = total_norm(norms)
    return (max_norm / (total + 1e-6)).clamp(max=1.0) if torch.isfinite(total) else total


def norm_of(gradient: Tensor) -> Tensor:
    norm = gradient.norm()
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
