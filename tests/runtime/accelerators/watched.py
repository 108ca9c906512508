"""Pipelines on simulated devices, for tests: also what the caller's thread does is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.pipeline import session_of
from stageline.runtime.devices import watching_caller


def chain(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    linear = [nn.Linear(6, 6) for _ in range(4)]
    if tied:
        linear[3].weight = linear[0].weight
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Dropout(0.1), linear[2], linear[3])


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(9, 6), torch.randn(9, 6)) for _ in range(count)]


@contextmanager
def watched(
    model: Any, *, checks: bool = True, watches: bool = True, **options: Any
) -> Iterator[sl.Pipeline]:
    """Open a pipeline on simulated devices, unless it `checks` nothing."""
    options = {"num_ranks": 2, "num_microbatches": 4, **options}
    fields = {"seed": 3, "check_streams": checks, **options.pop("options", {})}
    with sl.Pipeline(model, mse_loss, options=sl.Options(**fields), **options) as pipe:
        accelerators = session_of(pipe).assembly.layout.accelerators
        with watching_caller(accelerators) if watches else nullcontext():
            yield pipe
