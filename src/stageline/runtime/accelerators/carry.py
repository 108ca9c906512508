"""Carry values between the devices of ranks: trees of tensors, copied where devices differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stageline.model import trees
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.exactness.strided_copy import with_layout_of


def carried(values: Any, source: Accelerator | None, target: Accelerator | None) -> Any:
    """Return values on another rank's device, copied on the current streams of both."""
    if source is target:
        return values
    if target is None:  # a rank on the CPU, where nothing is queued: the host has to wait
        return on_tensors(lambda tensor: with_layout_of(tensor, tensor.cpu()), values)
    if source is None:
        return on_tensors(target.upload, values)
    return on_tensors(lambda tensor: target.copy_from(tensor, source), values)


def brought(values: Any, accelerator: Accelerator) -> Any:
    """Return the caller's values on a device; those that are there already are not copied."""
    return on_tensors(accelerator.bring, values)


def on_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return a tree with other tensors, which require gradients if those did."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with torch.no_grad():
            made = function(leaf)
        return leaf if made is leaf else made.detach().requires_grad_(leaf.requires_grad)

    return trees.map_leaves(of, values)
