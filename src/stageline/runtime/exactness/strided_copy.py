"""Copy tensors with their strides and alignment, and find tensors that share memory.

The last bits of a sum or product depend on strides and alignment: MKL picks other kernels for other
strides, and for memory that does not begin at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn

ALIGNED = 64  # bytes; torch's own memory begins at multiples of it


def exact_copy(tensor: Tensor) -> Tensor:
    """Return a copy that has the strides and the alignment of the original, and no graph."""
    if not _has_memory(tensor):
        return tensor.detach().clone()
    return copy_as(tensor.detach(), tensor.stride(), misalignment(tensor))


def copy_as(source: Tensor, strides: Sequence[int], lead: int) -> Tensor:
    """Return a copy with these strides, which begins `lead` elements after an aligned address.

    A dimension of stride 0, as `expand` makes it, has stride 0 in the copy. Other overlapping
    memory is copied densely.
    """
    base = source
    for dim, (size, stride) in enumerate(zip(source.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            base = base.narrow(dim, 0, 1)
    if not source.numel() or _overlaps(base.shape, strides):
        return source.clone()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(base.shape, strides, strict=True))
    memory = torch.empty(lead + extent, dtype=source.dtype, device=source.device)
    memory.as_strided(base.shape, strides, lead).copy_(base)
    return memory.as_strided(source.shape, strides, lead)


def with_layout_of(original: Tensor, copy: Tensor) -> Tensor:
    """Return a tensor's copy on another device with the strides and the alignment of the tensor.

    `Tensor.to` keeps neither those of slices nor those of what `expand` makes.
    """
    return laid_out(copy, layout_of(original)) if _has_memory(original) else copy


def layout_of(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the strides of a tensor, and how many elements after an aligned address it begins."""
    return (tensor.stride(), misalignment(tensor)) if _has_memory(tensor) else ((), 0)


def laid_out(tensor: Tensor, layout: tuple[tuple[int, ...], int]) -> Tensor:
    """Return a tensor with another one's layout: itself if it has that, or a copy."""
    is_there = not _has_memory(tensor) or layout_of(tensor) == layout
    return tensor if is_there else copy_as(tensor, *layout)


def misalignment(tensor: Tensor) -> int:
    """Return how many elements after an aligned address the tensor begins."""
    return tensor.data_ptr() % ALIGNED // tensor.element_size()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element in the same memory."""
    if not (_has_memory(one) and _has_memory(other)):
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (begin, end), (other_begin, other_end) = _span(one), _span(other)
    if end <= other_begin or other_end <= begin:
        return False
    if begin == other_begin or (one.is_contiguous() and other.is_contiguous()):
        return True
    # Slices may interleave, as the halves of rows do: mark the bytes of one, look at the other's.
    first = min(begin, other_begin)
    marks = np.zeros(max(end, other_end) - first, dtype=bool)
    for offset in range(one.element_size()):
        as_strided(marks[begin - first + offset :], one.shape, _in_bytes(one))[...] = True
    return any(
        as_strided(marks[other_begin - first + offset :], other.shape, _in_bytes(other)).any()
        for offset in range(other.element_size())
    )


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has plain memory: not a sparse, a fake or a distributed one."""
    is_plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte and the one after the last, counted from the storage's first."""
    width = tensor.element_size()
    begin = int(tensor.storage_offset()) * width
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((n - 1) * stride for n, stride in pairs)) * width


def _in_bytes(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two elements of such a tensor may be the same memory."""
    reach = 1  # elements spanned by the dimensions seen so far
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False
