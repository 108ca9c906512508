"""Contestants have to compute the same before they are timed: losses, and every gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isclose
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.compare.contestants.contestant import (
    Contestant,
    Gradients,
    gradients_of,
    rank,
)
from benchmarks.compare.contestants.loops import plain_step
from benchmarks.compare.turns import slowest
from benchmarks.compare.workloads import Case

# Sums over micro-batches are in other orders, so gradients differ in their last bits.
TOLERANCE = 1e-3  # of a tensor's largest element; and of the loss


class DisagreementError(Exception):
    """Raised when contestants do not compute the same: then their times cannot be compared."""


class Outcome(NamedTuple):
    """The gradients that a step leaves in this process, and its loss where it is known."""

    gradients: Gradients
    loss: float | None


def plain_outcome(case: Case, num_microbatches: int) -> Outcome:
    """Return what a plain loop computes, on a copy of the model."""
    own = case.copy()
    loss = plain_step(own, num_microbatches, range(num_microbatches))()
    return Outcome(gradients_of(own.layers), loss)


def check_agreement(
    contestants: Sequence[Contestant], case: Case, reference: Outcome | None = None
) -> None:
    """Raise on all ranks if a contestant's step differs on one of them.

    Without a reference, which takes long on emulated layers, the first contestant is it.
    """
    for contestant in contestants:
        if not contestant.is_comparable:
            continue
        found = outcome(contestant)
        reference = reference or found
        problems = list(differences(found, reference))
        if slowest(float(len(problems))):
            raise DisagreementError(f"{contestant.name}, rank {rank()}: {'; '.join(problems[:3])}")
        if missing := _missing(found.gradients, case):
            raise DisagreementError(f"{contestant.name}: no gradient of {', '.join(missing[:3])}")


def outcome(contestant: Contestant) -> Outcome:
    """Run a step, and take what it leaves."""
    contestant.zero_grad()
    loss = contestant.loss(contestant.step())
    found = Outcome(contestant.gradients(), loss)
    contestant.zero_grad()
    return found


def differences(found: Outcome, reference: Outcome) -> Iterator[str]:
    """Yield what is not as in the reference; gradients of other ranks are not known here."""
    if not is_close(found.loss, reference.loss):
        yield f"the loss is {found.loss}, but should be {reference.loss}"
    for name in sorted(found.gradients.keys() & reference.gradients.keys()):
        wanted = reference.gradients[name]
        error = float((found.gradients[name] - wanted).abs().max())
        if not error <= TOLERANCE * max(float(wanted.abs().max()), 1e-6):
            yield f"the gradient of {name} is off by {error:.2g}"


def is_close(one: float | None, other: float | None) -> bool:
    """Return whether two losses are the same, as far as this process knows them."""
    return None in (one, other) or isclose(one or 0, other or 0, rel_tol=TOLERANCE, abs_tol=1e-6)


def _missing(gradients: Gradients, case: Case) -> list[str]:
    """Return the parameters that have a gradient in no process, the same list in all."""
    names = [
        layer.full_name(name)
        for layer in case.layers
        for name, _ in layer.module.named_parameters()
    ]
    has = torch.tensor([float(name in gradients) for name in names])
    if dist.is_initialized():
        dist.all_reduce(has, dist.ReduceOp.MAX)
    return [name for name, flag in zip(names, has.tolist(), strict=True) if not flag]
