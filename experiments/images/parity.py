"""Do four partitions give the bits of one? Train both with the whole recipe and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.images.training import NUM_PARTITIONS, Training, digest, fit, new_pipeline


def compare(run: Training, runs: Path) -> dict[str, Any]:
    """Return how many parameters and buffers are equal after training on 1 and 4 partitions."""
    one, four = (trained_state(run, runs, number) for number in (1, NUM_PARTITIONS))
    names = differing(one, four)
    return {
        "tensors": len(one),
        "equal": len(one) - len(names),
        "first difference": names[0] if names else None,
        "weights": digest(one),
        "weights on 4": digest(four),
    }


def trained_state(run: Training, runs: Path, num_partitions: int) -> dict[str, Tensor]:
    """Return parameters and buffers at the end of a run."""
    with new_pipeline(run, num_partitions) as pipe:
        fit(run, pipe, run.folder(runs / f"parity-{num_partitions}"))
        return {name: value.clone() for name, value in pipe.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in two states of the same model.

    >>> differing({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.0000001])})
    ['a']
    """
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
