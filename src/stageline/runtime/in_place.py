"""Layers that change what they are given, as `x += 1` does, at the edge of their stage.

There a value is shared with other readers and with a recomputation, and is the leaf of a graph, so
such a layer gets a copy. Which layers are such is seen in their first forward, by the version that
torch counts up with every change: a copy for all would cost each stage an activation more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.runtime import trees
from stageline.runtime.randomness import is_of_torch


class InPlace:
    """State: what was seen of the layers, in training and evaluation, with a graph or without."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.gentle = {module for module in modules if leaves_alone(module)}
        self.seen: dict[tuple[nn.Module, bool, bool], bool] = {}  # whether it left things alone

    def give(self, module: nn.Module, tree: Any) -> Any:
        """What the layer may be called with in place of this tree of leaves."""
        is_gentle = module in self.gentle or self.seen.get(_key(module), False)
        return trees.map_leaves(trees.itself if is_gentle else trees.copied, tree)

    def look(self, name: str, module: nn.Module, given: Iterable[tuple[Tensor, int]]) -> None:
        """After a call: compare tensors with the versions that they had before."""
        is_gentle = all(tensor._version == version for tensor, version in given)  # noqa: SLF001
        if self.seen.setdefault(_key(module), is_gentle) and not is_gentle:
            self.seen[_key(module)] = False
            raise ModelError(
                f"layer {name!r} changed what it was given in place, but not when it first ran, "
                "and others may read it too: run the step again, or let the layer change a clone"
            )


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """The tensors of a tree as they are before a call."""
    tensors = (tensor for tensor in trees.tensors(tree) if not tensor.is_inference())
    return [(tensor, tensor._version) for tensor in tensors]  # noqa: SLF001


def leaves_alone(module: nn.Module) -> bool:
    """Only modules of torch.nn say so beforehand, if they are not told to work in place."""
    parts = module.modules()
    return all(is_of_torch(part) and not getattr(part, "inplace", False) for part in parts)


def _key(module: nn.Module) -> tuple[nn.Module, bool, bool]:
    return module, module.training, torch.is_grad_enabled()
