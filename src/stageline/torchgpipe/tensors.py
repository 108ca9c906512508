"""Tensors and tuples of tensors: what may enter and leave a `GPipe`, cut and joined along dim 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.errors import BatchError

Tensors = Tensor | tuple[Tensor, ...]


def check_tensors(value: object, what: str) -> None:
    """Raise TypeError unless a value is a tensor or a tuple of tensors."""
    if isinstance(value, Tensor):
        return
    if not isinstance(value, tuple):
        raise TypeError(
            f"the {what} is of type {type(value).__name__}, but GPipe takes and returns a tensor "
            "or a tuple of tensors: use these, or sl.Pipeline, which takes any container"
        )
    for number, item in enumerate(value):
        if not isinstance(item, Tensor):
            raise TypeError(
                f"item {number} of the {what} is of type {type(item).__name__}, but has to be a "
                "tensor: keep other values in the model, or use sl.Pipeline"
            )


def scatter(batch: Tensors, chunks: int) -> list[Tensors]:
    """Cut a mini-batch as `torch.chunk` does: ceil(samples / chunks) each, and fewer in the last.

    >>> [len(part) for part in scatter(torch.zeros(10), 4)]
    [3, 3, 3, 1]
    """
    if isinstance(batch, Tensor):
        return [*batch.chunk(chunks)]
    columns = [tensor.chunk(chunks) for tensor in batch]
    counts = {len(column) for column in columns}
    if len(counts) != 1:
        lengths = ", ".join(str(len(tensor)) for tensor in batch) or "none"
        raise BatchError(
            f"lengths of the inputs along dim 0 are {lengths}, but all have to be cut into the "
            "same number of micro-batches: give inputs of one length"
        )
    return [*zip(*columns, strict=True)]


def gather(outputs: Sequence[Any]) -> Tensors:
    """Join the outputs of micro-batches along dim 0; a list becomes a tuple, as in torchgpipe."""
    parts: list[Any] = [tuple(each) if isinstance(each, list) else each for each in outputs]
    for part in parts:
        check_tensors(part, "output")
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
