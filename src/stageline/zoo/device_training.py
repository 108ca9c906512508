"""Train a small GPT on several devices with any schedule, and in a plain loop on one of them.

On devices whose operators add in no certain order, the plain loop differs from itself as well. So
if there is a difference it runs again, and how far it is from itself is told beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.model.device_settings import preserved_generators
from stageline.model.layers import Layer, LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.schedules.build import schedule_names
from stageline.zoo.gpt import gpt, loss
from stageline.zoo.plain import train_plainly
from stageline.zoo.plain_asynchronous import train_asynchronously

VOCABULARY, SEED = 64, 3
Batches = Sequence[tuple[Tensor, Tensor]]


class Sizes(NamedTuple):
    """The sizes of a GPT, and of its micro-batches."""

    width: int
    heads: int
    context: int
    samples: int


class Comparison(NamedTuple):
    """Differences, each as a part of the largest number of its tensor; 0 if all bits are equal."""

    difference: float  # of the weights of this process, from those of a plain loop
    of_itself: float  # of the plain loop's weights, from those of another run, if there was one
    losses: list[float]
    losses_of_plain_loop: list[float]


@dataclass(frozen=True)
class DeviceTraining:
    """A training on ranks with these devices; None for ranks on the CPU."""

    num_ranks: int
    devices: Sequence[torch.device] | None
    backend: str
    own_device: torch.device  # for the plain loop

    @property
    def num_microbatches(self) -> int:
        return 2 * self.num_ranks

    def pipeline(self, sizes: Sizes, schedule: str, **options: Any) -> Pipeline:
        """Return a pipeline whose weights and random numbers are the same at every call."""
        return Pipeline(
            self._layers(sizes, schedule),
            loss,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            schedule=schedule,
            devices=self.devices,
            backend=self.backend,
            optimizer_fn=momentum,
            options=Options(seed=SEED, **options),
        )

    def batches(self, sizes: Sizes, count: int) -> Batches:
        shape = self.num_microbatches * sizes.samples, sizes.context
        with seeded():
            pairs = torch.randint(VOCABULARY, (count, 2, *shape))
        return [(inputs, target) for inputs, target in pairs]

    def compare(self, sizes: Sizes, schedule: str, **options: Any) -> Comparison:
        """Train with a schedule and in a plain loop; all processes call this."""
        data = self.batches(sizes, 3)
        with self.pipeline(sizes, schedule, **options) as pipe:
            losses = [float(result.loss) for result in pipe.run(data)]
            found = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
            balance = pipe.balance
        wanted, expected = self._plainly(sizes, schedule, data, balance)
        differs, of_itself = difference(found, wanted), 0.0
        if differs != 0.0:
            again, _ = self._plainly(sizes, schedule, data, balance)
            of_itself = difference(again, wanted)
        return Comparison(differs, of_itself, losses, expected)

    def _layers(self, sizes: Sizes, schedule: str) -> LayerSequence:
        """Return layers, of which embedding and head have one weight if the schedule allows it."""
        width, heads, context, _ = sizes
        blocks, words = self.num_ranks, VOCABULARY
        with seeded():
            layers = gpt(
                vocabulary=words,
                width=width,
                heads=heads,
                blocks=blocks,
                context=context,
                dropout=0.1,
            )
            if schedule in schedule_names(synchronous=True):
                return layers
            return LayerSequence((*layers.layers[:-1], Layer("head", nn.Linear(width, words))))

    def _plainly(
        self, sizes: Sizes, schedule: str, data: Batches, balance: Sequence[int]
    ) -> tuple[dict[str, Tensor], list[float]]:
        layers, device, count = (
            self._layers(sizes, schedule),
            self.own_device,
            self.num_microbatches,
        )
        layers.modules.to(device)
        there = [(inputs.to(device), target.to(device)) for inputs, target in data]
        if schedule in schedule_names(synchronous=True):
            optimizer = momentum(layers.modules.parameters())
            losses = train_plainly(
                layers, loss, optimizer, there, num_microbatches=count, seed=SEED
            )
        else:
            losses = train_asynchronously(
                *(layers, loss, momentum, there),
                balance=balance,
                num_microbatches=count,
                rule=schedule,
                seed=SEED,
            )
        return {name: tensor.cpu() for name, tensor in layers.state_dict().items()}, losses


def momentum(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.05, momentum=0.9)


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of tensors, as a part of the largest number of its tensor.

    >>> difference({"x": torch.tensor([4.0, 0.0])}, {"x": torch.tensor([4.0, 1.0])})
    0.25
    """
    pairs = ((tensor.double(), wanted[name].double()) for name, tensor in found.items())
    parts = [(a - b).abs().max() / b.abs().max().clamp(min=1e-9) for a, b in pairs]
    return float(torch.stack(parts).max())  # which is nan if one of them is


@contextmanager
def seeded() -> Iterator[None]:
    """Draw the same numbers at every call, and leave torch's generators as they were."""
    with preserved_generators():
        torch.manual_seed(0)
        yield
