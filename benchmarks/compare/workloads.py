"""The workloads: a table of models with their batches, each in its size and in a tiny one.

A case has a number of layers that does not depend on the schedule, but for emulated accelerators,
which have a layer in each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from benchmarks.compare.models import embedding_heavy, encoder_decoder, untied
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stageline as sl
from stageline.zoo import gpt
from stageline.zoo.amoebanet import amoebanet_d
from stageline.zoo.emulated import Occupy
from stageline.zoo.resnet import resnet
from stageline.zoo.text import VOCABULARY

RANKS = 2  # of real models: the machine has two cores
MICROBATCHES = 8
EMULATED_RANKS = (2, 4, 8, 16)
EMULATED_MILLISECONDS = (1, 2, 5, 10, 20)


class Case(NamedTuple):
    """Layers, a loss and one mini-batch; `inputs` has the first stage's input first."""

    layers: sl.LayerSequence
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    inputs: dict[str, Tensor]
    target: Tensor

    @property
    def first_input(self) -> str:
        return next(iter(self.inputs))

    def sample(self, num_microbatches: int) -> dict[str, Tensor]:
        """Return the inputs of one micro-batch."""
        size = len(self.target) // num_microbatches
        return {name: value[:size] for name, value in self.inputs.items()}

    def part(self, number: int, count: int) -> Case:
        """Return one of several equal parts of the mini-batch, for a replica."""
        inputs = {name: value.chunk(count)[number] for name, value in self.inputs.items()}
        return self._replace(inputs=inputs, target=self.target.chunk(count)[number])

    def copy(self) -> Case:
        return self._replace(layers=self.layers.copy())


class Workload(NamedTuple):
    """A row of the table. `build` takes the number of stages, which only emulated layers need."""

    name: str
    build: Callable[[int], Case]
    tiny: Callable[[int], Case]
    num_ranks: int = RANKS
    num_microbatches: int = MICROBATCHES

    @property
    def is_emulated(self) -> bool:
        return self.name.startswith("emulated")

    def case(self, num_stages: int, *, is_quick: bool) -> Case:
        torch.manual_seed(0)  # the same weights in every process
        return (self.tiny if is_quick else self.build)(num_stages)


def language(_: int, *, batch: int, context: int, vocabulary: int, **sizes: Any) -> Case:
    """Return a GPT without tied weights on random tokens."""
    layers = untied(gpt.gpt(vocabulary=vocabulary, context=context, **sizes))
    tokens = torch.randint(0, vocabulary, (batch, context))
    return Case(layers, gpt.loss, {"x": tokens}, tokens.clone())


def images(_: int, *, model: Callable[[], sl.LayerSequence], batch: int, side: int) -> Case:
    """Return an image classifier of ten classes on noise."""
    x, y = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    return Case(model(), cross_entropy, {"x": x}, y)


def translation(
    _: int, *, batch: int, source: int, length: int, vocabulary: int, **sizes: Any
) -> Case:
    """Return an encoder-decoder; sources are longer than what is made of them."""
    layers = encoder_decoder(vocabulary=vocabulary, **sizes)
    inputs = {
        "source": torch.randint(0, vocabulary, (batch, source)),
        "query": torch.randint(0, vocabulary, (batch, length)),
    }
    return Case(layers, gpt.loss, inputs, inputs["query"].clone())


def texts(_: int, *, batch: int, length: int, vocabulary: int, **sizes: Any) -> Case:
    """Return a classifier of texts with a large embedding."""
    layers = embedding_heavy(vocabulary=vocabulary, classes=10, **sizes)
    tokens = torch.randint(0, vocabulary, (batch, length))
    return Case(layers, cross_entropy, {"x": tokens}, torch.randint(0, 10, (batch,)))


def mean(output: Tensor, _: Tensor) -> Tensor:
    """Return a loss without a target, for layers that compute nothing."""
    return output.mean()


def chain(num_stages: int, *, layer: Callable[[], nn.Module], batch: int) -> Case:
    """Return a layer in each stage."""
    layers = sl.LayerSequence.of(nn.Sequential(*(layer() for _ in range(num_stages))))
    return Case(layers, mean, {"x": torch.ones(batch, 1)}, torch.ones(batch, 1))


def emulated(num_ranks: int, milliseconds: float) -> Workload:
    """Return stages that occupy their rank for a time, forward and for each of two gradients."""
    count = 4 * num_ranks

    def build(scale: float) -> Callable[[int], Case]:
        seconds = scale * milliseconds / 1e3
        return partial(chain, layer=lambda: Occupy(seconds, seconds, seconds), batch=count)

    name = f"emulated p={num_ranks} F={milliseconds:g} ms"
    return Workload(name, build(1.0), build(0.1), num_ranks, count)


# Uneven models have the proportions of published ones, and sizes at which a step by hand takes
# 0.5 to 1.4 s: with less, much of the time is that of the host, and with more, `pipelines`, with
# 17 rounds of every schedule and contestant, takes hours.
SMALL: Any = {"vocabulary": VOCABULARY, "heads": 4, "context": 64, "dropout": 0.05}
TINY: Any = {"vocabulary": 31, "width": 16, "heads": 2, "blocks": 4, "context": 8, "batch": 8}
REAL = (
    Workload(
        "gpt-large",
        partial(language, vocabulary=128, width=512, heads=8, blocks=8, context=128, batch=8),
        partial(language, **TINY),
    ),
    Workload(
        "gpt-small",
        partial(language, width=128, blocks=4, batch=32, **SMALL),
        partial(language, dropout=0.05, **TINY),
    ),
    Workload(
        "gpt-vocabulary",
        # GPT-2 small with a quarter of its width and vocabulary: the head is a third of the work
        partial(language, vocabulary=12_564, width=192, heads=3, blocks=12, context=96, batch=32),
        partial(language, **TINY | {"vocabulary": 301}),
    ),
    Workload(
        "resnet",
        partial(images, model=lambda: resnet(3, 10, 24, [2, 2, 2]), batch=32, side=32),
        partial(images, model=lambda: resnet(3, 10, 4, [1, 1]), batch=16, side=8),
    ),
    Workload(
        "amoebanet",
        # GPipe's AmoebaNet-D on images of the same size, with fewer cells and filters
        partial(images, model=lambda: amoebanet_d(10, 6, 32), batch=32, side=224),
        partial(images, model=lambda: amoebanet_d(10, 3, 16), batch=16, side=64),
    ),
    Workload(
        "encoder-decoder",
        # BART-base with a quarter of its width and vocabulary, to summarise: its sources of 1,024
        # tokens have summaries of up to 142, which is 7 to 1
        partial(translation, batch=32, source=128, length=18, vocabulary=12_564, width=192,
                heads=3, blocks=6),
        partial(translation, batch=8, source=12, length=6, vocabulary=31, width=16, heads=2,
                blocks=2),
    ),
    Workload(
        "embedding-heavy",
        # of 18.5 million parameters 15.4 are in the embedding
        partial(texts, batch=64, length=64, vocabulary=60_000, width=256, hidden=768, blocks=6),
        partial(texts, batch=8, length=6, vocabulary=97, width=8, hidden=16, blocks=4),
    ),
)  # fmt: skip
UNEVEN = ("gpt-vocabulary", "embedding-heavy", "amoebanet", "encoder-decoder")
EMULATED = tuple(emulated(p, ms) for p in EMULATED_RANKS for ms in EMULATED_MILLISECONDS)
WORKLOADS = {workload.name: workload for workload in (*REAL, *EMULATED)}
