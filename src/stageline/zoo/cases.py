"""Four small models with data for five steps, trained in a plain loop or in a pipeline.

Together they have what makes bit-identical results hard: dropout, tied weights, skip connections,
BatchNorm, values with several readers, values that are no tensors, uneven batches and a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from stageline.model.device_settings import preserved_generators
from stageline.model.layers import LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline, session_of
from stageline.runtime.devices import watching_caller
from stageline.runtime.settings import LossFunction
from stageline.schedules.build import build_schedule
from stageline.zoo.branches import branches
from stageline.zoo.gpt import gpt
from stageline.zoo.gpt import loss as token_loss
from stageline.zoo.plain import Batch, train_plainly
from stageline.zoo.resnet import resnet
from stageline.zoo.unet import unet

NUM_MICROBATCHES = 8  # dualpipe_v needs as many on four ranks
LENGTHS = (13, 9, 5, 16, 11)  # samples per step; with 5, some micro-batches are empty
SEED = 11
BACKENDS = ("serial", "threads")  # they need no launcher
RANKS = (1, 2, 3, 4)


class Combination(NamedTuple):
    """A model and the pipeline options it is trained with."""

    model: str
    schedule: str
    backend: str
    num_ranks: int
    recompute: str

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return f"{self.model}, {self.schedule}, {self.backend}, {ranks}, recompute {self.recompute}"


class Case(NamedTuple):
    """A model, its loss, and a batch for each step."""

    layers: LayerSequence
    loss_fn: LossFunction
    batches: tuple[Batch, ...]


class Trained(NamedTuple):
    """The tensors and losses after training."""

    tensors: dict[str, Tensor]  # parameters, buffers and the optimizer's state
    losses: list[float]


def make_case(name: str) -> Case:
    """Return a new copy of a case; its weights and data are the same at every call."""
    with preserved_generators():
        torch.manual_seed(1)
        layers, loss_fn, batch = CASES[name]()
        return Case(layers, loss_fn, tuple(batch(length) for length in LENGTHS))


def plainly(case: Case, num_microbatches: int = NUM_MICROBATCHES, **options: Any) -> Trained:
    """Train in a plain loop."""
    optimizer = _optimizer(case)
    options |= {"num_microbatches": num_microbatches, "seed": SEED}
    losses = train_plainly(case.layers, case.loss_fn, optimizer, case.batches, **options)
    return Trained(_tensors(case, optimizer), losses)


def pipelined(case: Case, num_microbatches: int = NUM_MICROBATCHES, **options: Any) -> Trained:
    """Train in a pipeline."""
    optimizer = _optimizer(case)
    options |= {"num_microbatches": num_microbatches, "seed": SEED}
    pipe = Pipeline(case.layers, case.loss_fn, **grouped(options))
    losses = []
    with pipe, watching_caller(session_of(pipe).assembly.layout.accelerators):
        for inputs, target in case.batches:
            losses.append(float(pipe.step(inputs, target).loss))
            optimizer.step()
            optimizer.zero_grad()
    return Trained(_tensors(case, optimizer), losses)


def grouped(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Pipeline`, with those of `Options` and of a schedule where they belong.

    >>> grouped({"num_ranks": 2, "seed": 1})["options"].seed
    1
    """
    found = dict(arguments)
    options = {
        field.name: found.pop(field.name) for field in fields(Options) if field.name in found
    }
    if options:
        found["options"] = replace(found.get("options", Options()), **options)
    of_schedule = {name: found.pop(name) for name in ("vertical_sync", "replicas") if name in found}
    if of_schedule:
        sizes = {name: found[name] for name in ("num_ranks", "num_microbatches") if name in found}
        found["schedule"] = build_schedule(found["schedule"], **sizes, **of_schedule)
    return found


def differences(found: Trained, wanted: Trained) -> list[str]:
    """Return the names of tensors that are not bit-identical."""
    names = sorted(found.tensors.keys() | wanted.tensors.keys())
    pairs = ((name, found.tensors.get(name), wanted.tensors.get(name)) for name in names)
    return [name for name, a, b in pairs if a is None or b is None or not torch.equal(a, b)]


def _optimizer(case: Case) -> torch.optim.AdamW:
    return torch.optim.AdamW(case.layers.modules.parameters(), lr=1e-2)


def _tensors(case: Case, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Include AdamW's moments: they show a gradient's last bits, which the first step hides."""
    tensors: dict[str, Tensor] = {}
    for layer in case.layers:
        named = (*layer.module.named_parameters(), *layer.module.named_buffers())
        tensors |= {f"{layer.name}.{name}": tensor.detach() for name, tensor in named}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
    return tensors


Parts = tuple[LayerSequence, LossFunction, Callable[[int], Batch]]


def _gpt() -> Parts:
    def batch(length: int) -> Batch:
        return torch.randint(24, (length, 6)), torch.randint(24, (length, 6))

    layers = gpt(vocabulary=24, width=8, heads=2, blocks=6, context=6, dropout=0.1)
    return layers, token_loss, batch


def _unet() -> Parts:
    def batch(length: int) -> Batch:
        return torch.randn(length, 3, 8, 8), torch.randint(2, (length, 8, 8))

    return unet(channels=3, classes=2, width=4), cross_entropy, batch


def _resnet() -> Parts:
    def batch(length: int) -> Batch:
        return torch.randn(length, 3, 8, 8), torch.randint(3, (length,))

    layers = resnet(channels=3, classes=3, width=4, blocks=[2, 1, 1])
    layers.layers[1].module.momentum = None  # type: ignore[assignment]  # a cumulative average
    return layers, cross_entropy, batch


def _branches() -> Parts:
    def batch(length: int) -> Batch:
        inputs = {"source": torch.randn(length, 5, 6), "query": torch.randn(length, 6)}
        return inputs | {"mask": None, "scale": 0.5}, torch.randint(3, (length,))

    return branches(width=6, classes=3), cross_entropy, batch


CASES: Mapping[str, Callable[[], Parts]] = MappingProxyType(
    {"gpt": _gpt, "unet": _unet, "resnet": _resnet, "branches": _branches}
)
