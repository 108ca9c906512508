"""Measure whether a device sends messages beside its work, or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from stageline.runtime.accelerators.accelerator import Accelerator

MATRIX_SIZE = 4096  # of a product that keeps a device busy


class Overlap(NamedTuple):
    """Seconds of work and of messages, each alone and both at once."""

    work: float
    messages: float
    both: float

    @property
    def hidden(self) -> float:
        """Return the share of the shorter one that the other hides.

        >>> Overlap(2.0, 1.0, 2.25).hidden
        0.75
        """
        return (self.work + self.messages - self.both) / min(self.work, self.messages)


def measure_overlap(
    accelerator: Accelerator,
    messages: Callable[[], object],
    synchronize: Callable[[], None],
    agree: Callable[[int], int] = lambda count: count,
    matrix_size: int = MATRIX_SIZE,
) -> Overlap:
    """Measure a function that queues messages, beside products that take about as long.

    All ranks with an end of a message call this. `synchronize` waits until all their devices have
    nothing to do, and `agree` makes one number of each rank's.
    """
    stream = accelerator.new_stream("products")
    with accelerator.queueing_on(stream):
        matrix = torch.ones(matrix_size, matrix_size, device=accelerator.device)

    def products(count: int) -> None:
        with accelerator.queueing_on(stream):
            for _ in range(count):
                torch.mm(matrix, matrix)

    def seconds(count: int, *further: Callable[[], object]) -> float:
        for _ in range(2):  # the first one warms up
            synchronize()
            start = perf_counter()
            products(count)
            for work in further:
                work()
            synchronize()
        return perf_counter() - start

    alone = seconds(0, messages)
    count = agree(max(1, round(4 * alone / seconds(4))))
    return Overlap(seconds(count), alone, seconds(count, messages))
