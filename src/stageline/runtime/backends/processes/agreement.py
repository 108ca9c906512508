"""Check that all ranks are about to do the same, before they work together."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from stageline.errors import ModelError
from stageline.model import trees
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.placement.layout import Layout
from stageline.runtime.stage.stage_values import Target


def check_agreement(
    layout: Layout, recompute: Sequence[str], minibatch: MiniBatch, collectives: Collectives
) -> None:
    """Raise on every rank unless all have the same model, schedule, options and data."""
    if all(map(collectives.has, range(layout.schedule.num_ranks))):
        return
    found = collectives.gather(signature(layout, recompute, minibatch), "the arguments of a step")
    for what, here in found[0].items():
        others = {rank: each[what] for rank, each in enumerate(found) if each[what] != here}
        if others:
            rank, there = next(iter(others.items()))
            raise ModelError(
                f"{what}: rank 0 has {here}, but rank {rank} has {there}: all ranks make the same "
                "calls with the same arguments"
            )


def signature(layout: Layout, recompute: Sequence[str], minibatch: MiniBatch) -> dict[str, str]:
    """Return what all ranks must have in common, in few words each."""
    schedule, layers = layout.schedule, layout.layers
    shapes = [
        (layer.full_name(name), tuple(tensor.shape), str(tensor.dtype))
        for layer in layers
        for name, tensor in layer.module.named_parameters()
    ]
    inputs = minibatch.inputs
    batch = {
        name: [tuple(tensor.shape) for part in inputs for tensor in trees.tensors(part[name])]
        for name in sorted(inputs[0])
    }
    return {
        "num_microbatches": str(schedule.num_microbatches),
        "schedule": f"{schedule.name!r} ({_digest(schedule.actions)})",
        "model": f"{len(layers)} layers ({_digest(shapes)})",
        "balance": str(list(layout.balance)),
        "recompute": str(list(recompute)),
        "seed": f"{minibatch.seed}, step {minibatch.number}",
        "batch": str(batch),
        "data": _data_digest((*inputs, *minibatch.targets)),
        "torch": str(torch.__version__),
    }


def _digest(value: object) -> str:
    """Return a few letters that differ if anything does."""
    return blake2b(repr(value).encode(), digest_size=4).hexdigest()


def _data_digest(parts: Sequence[Any]) -> str:
    """Return a few letters that differ if any number of the micro-batches or targets does."""
    found = blake2b(digest_size=4)
    for part in parts:
        tree = part.target if isinstance(part, Target) else part
        for tensor in trees.tensors(tree):
            found.update(_numbers(tensor))
    return found.hexdigest()


def _numbers(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if its memory has nothing else."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
