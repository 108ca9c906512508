"""Run predicted stages on emulated accelerators: each layer occupies its rank for its stage's time.

Times are those of the prediction times a scale, so that a step is long against the runtime's own
work and short enough to be measured several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stageline as sl
from experiments.tables.gpipe_program import per_stage, with_links_as_ranks
from stageline.zoo.emulated import Occupy, lateness, sleep_until

Updates = dict[int, float]  # seconds, by the id of a parameter


class EmulatedUpdate(torch.optim.SGD):
    """An optimizer whose step takes a given time, and changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], seconds: float) -> None:
        super().__init__(parameters, lr=0.0)
        self.seconds = seconds

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        sleep_until(perf_counter() + self.seconds)


class Emulated(NamedTuple):
    """A pipeline of emulated stages in GPipe's order, with a mini-batch for it."""

    pipe: sl.Pipeline
    batch: tuple[Tensor, Tensor]

    def step(self) -> float:
        """Return how long a step takes, with its update."""
        start = perf_counter()
        self.pipe.step(*self.batch)
        return perf_counter() - start

    def traced_step(self) -> tuple[sl.Timeline, float]:
        """Return the measured timeline of a step, and how long the whole step took."""
        with self.pipe.trace() as trace:
            seconds = self.step()
        return trace.timeline, seconds

    def warm_up(self) -> None:
        """Start the threads: a batch of one micro-batch, which is short."""
        inputs, target = self.batch
        self.pipe.step(inputs[:1], target[:1])


def emulated(costs: sl.Costs, num_microbatches: int, scale: float, *, links: bool) -> Emulated:
    """Return a pipeline whose stages take `scale` times their costs.

    With `links`, the link between two stages is a rank of its own, which holds one message at a
    time, as long as its bytes take.
    """
    costs = with_links_as_ranks(costs) if links else costs
    times = [per_stage(costs, name) for name in ("forward", "input_grad", "weight_grad", "step")]
    again = ["always" if time else "never" for time in per_stage(costs, "recompute")]
    layers, updates = [], Updates()
    for forward, input_grad, weight_grad, update in zip(*times, strict=True):
        layer = Occupy(scale * forward, scale * input_grad, scale * weight_grad)
        layers.append(layer)
        updates[id(layer.weight)] = scale * update

    def optimizer(parameters: Iterable[nn.Parameter]) -> EmulatedUpdate:
        own = list(parameters)
        return EmulatedUpdate(own, sum(updates[id(parameter)] for parameter in own))

    pipe = sl.Pipeline(
        nn.Sequential(*layers),
        mean,
        num_ranks=len(layers),
        num_microbatches=num_microbatches,
        schedule="gpipe",
        balance=[1] * len(layers),
        recompute=again,
        backend="threads",
        optimizer_fn=optimizer,
    )
    samples = torch.ones(num_microbatches, 1)
    return Emulated(pipe, (samples, samples))


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def measure(
    costs: sl.Costs, num_microbatches: int, scale: float, steps: int, *, links: bool
) -> dict[str, Any]:
    """Return the seconds of each step, as a device of the prediction would take them."""
    made = emulated(costs, num_microbatches, scale, links=links)
    with made.pipe:
        made.warm_up()
        taken = [made.step() / scale for _ in range(steps)]
    return {"steps": taken, "scale": scale, "links": links, "lateness_ms": 1e3 * lateness()}
