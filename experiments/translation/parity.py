"""Compare training in four partitions with training in one: all parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

import stageline as sl
from experiments.translation.data import Data
from experiments.translation.training import Recipe, batches, pipeline

MICROBATCHES = 4


def parameters_after(recipe: Recipe, data: Data, num_ranks: int) -> tuple[dict[str, Tensor], str]:
    """Train and return all parameters by name, and a description of the partitions."""
    torch.manual_seed(recipe.seed)
    every = list(islice(batches(recipe, data), recipe.steps))
    with pipeline(recipe, data, num_ranks=num_ranks, num_microbatches=MICROBATCHES) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=recipe.rate)
        sl.fit(pipe, every, optimizer, steps=recipe.steps, report_every=recipe.steps)
        found = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        return found, partitions(pipe)


def partitions(pipe: sl.Pipeline) -> str:
    """Return the names of the first and the last layer of each stage."""
    names = iter([layer.name for layer in pipe.layers])
    stages = [list(islice(names, size)) for size in pipe.balance]
    return "; ".join(f"{stage[0]} … {stage[-1]}" for stage in stages)


def different(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters that differ in any bit, or are in one of them only."""
    shared = first.keys() & second.keys()
    unequal = {name for name in shared if not torch.equal(first[name], second[name])}
    return sorted(unequal | (first.keys() ^ second.keys()))
