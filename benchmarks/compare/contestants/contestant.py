"""What all contestants have in common: a step, what it leaves behind, and an end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

import stageline as sl
from stageline.report.timeline import Timeline

Gradients = dict[str, Tensor]


def nothing() -> None:
    """Do nothing: in processes that a contestant does not use, and if nothing is to be closed."""


def no_loss(_: Any) -> float | None:
    """Return no loss, in processes that do not know it."""
    return None


@dataclass(frozen=True)
class Contestant:
    """One library on one case. All processes have it, even those in which it does nothing."""

    name: str
    layers: sl.LayerSequence  # its own; those whose parameters it trains in this process
    step: Callable[[], Any]  # forward and backward of one mini-batch; adds to the gradients
    loss: Callable[[Any], float | None] = no_loss  # of what `step` returned
    close: Callable[[], object] = nothing
    num_threads: int = 1
    is_comparable: bool = True  # its gradients are those of the mini-batch
    trace: Callable[[], Timeline] | None = None  # a step's timeline; called in all processes

    def zero_grad(self) -> None:
        for parameter in self.layers.modules.parameters():
            parameter.grad = None

    def in_a_row(self, num_steps: int, *, reads: bool = False) -> Contestant:
        """Return the same with several steps in each turn; `reads`: the loss is read after each."""

        def steps() -> Any:
            for _ in range(num_steps):
                result = self.step()
                if reads:
                    self.loss(result)
            self.loss(result)  # what is still on its way has arrived then
            return result

        return replace(self, step=steps)

    def gradients(self) -> Gradients:
        """Return those that this process has."""
        return gradients_of(self.layers)


def gradients_of(layers: Iterable[sl.Layer]) -> Gradients:
    """Return gradients by the parameters' names in the model."""
    return {
        layer.full_name(name): parameter.grad
        for layer in layers
        for name, parameter in layer.module.named_parameters()
        if parameter.grad is not None
    }


def cut_batch(values: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Return the micro-batches of named tensors, whose sizes are equal."""
    columns = {name: value.chunk(count) for name, value in values.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def rank() -> int:
    """Return the number of this process, 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0
