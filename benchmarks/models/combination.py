"""Train one model in one way, and compare every bit with the plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from benchmarks.models.case import Case
from benchmarks.models.catalogue import NAMED, make_case
from benchmarks.models.dropout import RATE, set_dropout
from benchmarks.models.reference import loss_weights, plain_losses
from torch import Tensor

import stageline as sl
from stageline.runtime.batches import microbatches

SCHEDULES = {"gpipe": "always", "1f1b": "never", "zb_h1": "never", "zbv": "never"}  # recompute
RANKS = (2, 3)
BACKENDS = ("threads", "processes")
NUM_MICROBATCHES = 3
# Samples and size of each step. The first is recorded; the second has micro-batches of other sizes
# and other lengths, or images of another size where the model allows.
STEPS = ((6, 0), (8, 1))
SEED = 0


@dataclass(frozen=True)
class Combination:
    """One way to train a model."""

    schedule: str
    num_ranks: int
    backend: str
    dropout: bool

    def __str__(self) -> str:
        dropout = "dropout" if self.dropout else "no dropout"
        return f"{self.schedule}, {self.num_ranks} {self.backend}, {dropout}"


def combinations(name: str) -> list[Combination]:
    """Return all ways to train a model; one without dropout has half of them.

    In processes, which take four times as long, only the models that people ask for first have all
    of them; for the others dropout is on and off by turns, so that each schedule has both.
    """
    has_both = has_dropout(name)
    choices = product(SCHEDULES, RANKS, BACKENDS, (True, False) if has_both else (False,))
    found = [Combination(*choice) for choice in choices]
    return [
        each
        for each in found
        if not has_both or name in NAMED or each.backend == "threads" or _is_its_turn(each)
    ]


def _is_its_turn(combination: Combination) -> bool:
    turn = list(SCHEDULES).index(combination.schedule) + combination.num_ranks
    return combination.dropout == (turn % 2 == 0)


def quick_combinations(name: str, number: int) -> list[Combination]:
    """Return one schedule, by turns: in threads on 2 ranks, and in processes on 3."""
    schedule, dropout = list(SCHEDULES)[number % len(SCHEDULES)], has_dropout(name)
    places = zip(RANKS, BACKENDS, strict=True)
    return [Combination(schedule, ranks, backend, dropout) for ranks, backend in places]


def has_dropout(name: str) -> bool:
    return set_dropout(make_case(name).model, RATE) > 0


@dataclass(frozen=True)
class Trained:
    """What a step leaves behind."""

    losses: list[tuple[float, float]]  # with the weights of their micro-batches
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]  # parameters and buffers


@dataclass(frozen=True)
class Report:
    """What one process found: the names that it has, and what differs from the plain loop."""

    num_layers: int
    parameters: list[str]
    state: list[str]
    fault: str


def train_and_compare(name: str, combination: Combination) -> Report:
    """Make a step on each batch, and compare this process's part of the model after each."""
    case = _case(name, dropout=combination.dropout)
    model = deepcopy(case.model)
    found: list[Trained] = []
    with sl.Pipeline(
        model,
        case.loss_fn,
        example_inputs=case.batch(*STEPS[0])[0],
        num_ranks=combination.num_ranks,
        num_microbatches=NUM_MICROBATCHES,
        schedule=combination.schedule,
        recompute=SCHEDULES[combination.schedule],
        backend=combination.backend,
        options=sl.Options(batch_norm="microbatch", seed=SEED),
    ) as pipe:
        for step in STEPS:
            pipe.zero_grad()
            losses = [(float(loss), w) for loss, w in pipe.step(*case.batch(*step)).losses]
            gradients = {n: _copy(p.grad) for n, p in pipe.named_parameters()}
            found.append(Trained(losses, gradients, _tensors(pipe.state_dict())))
        layers = _parameters_of_layers(pipe)
        names = [n for n, _ in pipe.named_parameters()], list(pipe.state_dict())
    wanted = plainly(name, dropout=combination.dropout, layers=layers)
    faults = [
        f"step {i + 1}: {fault}"
        for i, (a, b) in enumerate(zip(found, wanted, strict=True))
        for fault in differences(a, b)
    ]
    return Report(len(layers), *names, faults[0] if faults else "")


Layers = tuple[tuple[str, tuple[str, ...]], ...]  # names of layers, and of their parameters


def _parameters_of_layers(pipe: sl.Pipeline) -> Layers:
    return tuple(
        (layer.name, tuple(n for n, _ in layer.module.named_parameters(remove_duplicate=False)))
        for layer in pipe.layers
    )


@lru_cache(maxsize=2)
def _case(name: str, *, dropout: bool) -> Case:
    case = make_case(name)
    set_dropout(case.model, RATE if dropout else 0.0)
    case.model.train()
    return case


@lru_cache(maxsize=4)
def plainly(name: str, *, dropout: bool, layers: Layers) -> list[Trained]:
    """Return what the unwrapped model has after each step of a plain loop over micro-batches."""
    case = _case(name, dropout=dropout)
    model = deepcopy(case.model)
    found = []
    for number, step in enumerate(STEPS):
        model.zero_grad()
        sizes = microbatches.sizes(step[0], NUM_MICROBATCHES)
        parts = microbatches.cut(case.batch(*step), sizes)
        weights = loss_weights(model, parts, sizes, case.loss_fn)
        per_layer = {layer: list(names) for layer, names in layers}
        losses = plain_losses(model, parts, weights, case.loss_fn, per_layer, SEED, number)
        named = model.named_parameters(remove_duplicate=False)
        gradients = {n: _copy(p.grad) for n, p in named}
        pairs = list(zip(map(float, losses), weights, strict=True))
        found.append(Trained(pairs, gradients, _tensors(model.state_dict())))
    return found


def differences(found: Trained, wanted: Trained) -> Iterator[str]:
    if found.losses != wanted.losses:
        yield f"losses are {found.losses}, not {wanted.losses}"
    for name, gradient in found.gradients.items():
        if not _same(gradient, wanted.gradients[name]):
            yield f"gradient of {name} differs"
    for name, tensor in found.state.items():
        if not _same(tensor, wanted.state[name]):
            yield f"{name} differs"


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: value.clone() for n, value in state.items() if isinstance(value, Tensor)}
