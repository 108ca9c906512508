"""What all ranks must have in common before they work together, in few words each."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from stageline.model.layers import LayerSequence
from stageline.runtime import trees
from stageline.runtime.engine.loop import Step
from stageline.runtime.stage.stage_values import Target
from stageline.schedules.schedule import Schedule


def signature(
    schedule: Schedule,
    layers: LayerSequence,
    balance: Sequence[int],
    recompute: Sequence[str],
    step: Step,
) -> dict[str, str]:
    shapes = [
        (layer.name, name, tuple(tensor.shape), str(tensor.dtype))
        for layer in layers
        for name, tensor in layer.module.named_parameters()
    ]
    batch = {
        name: [tuple(tensor.shape) for part in step.inputs for tensor in trees.tensors(part[name])]
        for name in sorted(step.inputs[0])
    }
    return {
        "num_microbatches": str(schedule.num_microbatches),
        "schedule": f"{schedule.name!r} ({_digest(schedule.actions)})",
        "model": f"{len(layers)} layers ({_digest(shapes)})",
        "balance": str(list(balance)),
        "recompute": str(list(recompute)),
        "seed": f"{step.seed}, step {step.number}",
        "batch": str(batch),
        "data": _digest([_numbers(part) for part in (*step.inputs, *step.targets)]),
        "torch": str(torch.__version__),
    }


def _digest(value: object) -> str:
    """A few letters that differ if anything does."""
    return blake2b(repr(value).encode(), digest_size=4).hexdigest()


def _numbers(tree: Any) -> list[bytes]:
    """What is in the tensors of a micro-batch, or of its target."""
    tree = tree.target if isinstance(tree, Target) else tree
    flat = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in trees.tensors(tree))
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in flat]
