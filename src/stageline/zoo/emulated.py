"""An emulated accelerator: a layer that occupies its rank for given times and computes nothing.

The layer sleeps, which releases the interpreter lock, so that eight ranks on two cores overlap as
eight devices would. The time beyond the simulated one is then the overhead of the pipeline.
"""

from __future__ import annotations

from functools import cache
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn


class Occupy(nn.Module):
    """A layer that returns its input after `forward` seconds; its backward takes time as well.

    The gradient of its one weight, 1.0, takes `weight_grad` seconds when it is computed: together
    with the input gradient in B, or during W in a split backward. The times are from the call to
    the return, and include the few operators in between.

    >>> Occupy(forward=0.001, input_grad=0.001, weight_grad=0.001)(torch.ones(2, 1)).shape
    torch.Size([2, 1])
    """

    def __init__(self, forward: float, input_grad: float, weight_grad: float) -> None:
        super().__init__()
        self.seconds = forward, input_grad, weight_grad
        lateness()  # measured now, not in the middle of a benchmark
        self.until: float | None = None  # when the current part of a backward ends
        self.weight = nn.Parameter(torch.ones(1, 1))
        self._watch_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of another one: a copy of a weight has none of its hooks."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        self._watch_weight()

    def _watch_weight(self) -> None:
        if self.weight.requires_grad:  # not where shapes are predicted
            self.weight.register_hook(self._weight_done)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        end = perf_counter() + self.seconds[0]
        if torch.is_grad_enabled():
            # a new tensor in this graph, even if the input is reused or needs no gradient
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            x.register_hook(self._input_done)  # type: ignore[no-untyped-call]
        y = x @ self.weight
        if y.requires_grad:
            y.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        sleep_until(end)
        return y

    def _backward_begins(self, _: Tensor) -> None:
        self.until = perf_counter()

    def _weight_done(self, _: Tensor) -> None:
        begun = self.until if self.until is not None else perf_counter()
        sleep_until(begun + self.seconds[2])
        if self.until is not None:
            self.until = begun + self.seconds[2]

    def _input_done(self, _: Tensor) -> None:
        assert self.until is not None  # set when the output gradient arrived
        sleep_until(self.until + self.seconds[1])
        self.until = None


def sleep_until(end: float) -> None:
    """Sleep until this `perf_counter`: accurate in the median on an idle machine."""
    seconds = end - perf_counter()
    if seconds > 0:
        sleep(max(0.0, seconds - lateness()))


@cache
def lateness() -> float:
    """Return how late a sleep ends on this machine: 0.1 ms on Linux, half of it timer slack."""
    late = []
    for _ in range(25):
        start = perf_counter()
        sleep(0.002)
        late.append(perf_counter() - start - 0.002)
    return median(late)
