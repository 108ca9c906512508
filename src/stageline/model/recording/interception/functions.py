"""Functions of torch as a recording sees them: their names, and what they do by those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stageline.model import trees
from stageline.model.recording.tape import Arguments

READING = ("__iter__", "__int__", "__index__", "__invert__", "__init__", "__init_subclass__")


def may_hold_tensors(result: Any) -> bool:
    return isinstance(result, Tensor | tuple | list | dict) and not isinstance(result, torch.Size)


def function_name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", type(func).__name__)).strip("_")


def is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a function is named as those that change their first argument are."""
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in READING)
    return name.endswith("_")


def works_on_meta(func: Callable[..., Any], call: Arguments) -> bool:
    """Return whether a function asks for no values: it can do without any."""

    def meta(leaf: Any) -> Any:
        return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf

    args, kwargs = trees.map_leaves(meta, call)
    try:
        func(*args, **kwargs)
    except Exception:  # torch has several for values that are not there
        return False
    return True


def is_shown(func: Callable[..., Any], call: Arguments) -> bool:
    """Return whether a single number becomes text, by which a model may choose."""
    if func not in (Tensor.__format__, Tensor.__repr__):
        return False
    tensor = trees.tensors(call)[0]
    return tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex()


def is_packing(func: Callable[..., Any]) -> bool:
    """Return whether a function packs sequences: data of layers, and sizes of lengths alone."""
    return function_name(func) == "pack_padded_sequence"


def packed_batch_sizes(lengths: Tensor) -> Tensor:
    """Return how many sequences have each step; lengths are sorted, the longest first.

    >>> packed_batch_sizes(torch.tensor([3, 1]))
    tensor([2, 1, 1])
    """
    steps = torch.arange(int(lengths[0]), device=lengths.device)
    return (steps[:, None] < lengths).sum(dim=1)


def register_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Register a hook as a model has done, if there will be a gradient this time."""
    if tensor.requires_grad:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
