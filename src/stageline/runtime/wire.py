"""Messages between processes: one buffer of bytes each.

    [ a flag for each tensor, padded ][ tensor ][ tensor ] …     each padded to 64 bytes

Both sides know the forms of the tensors, so nothing else has to be sent. A flag says whether the
tensor is there (a gradient may be None) and whether it needs a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.errors import ModelError
from stageline.model.layers import Value
from stageline.runtime import trees
from stageline.runtime.shapes import Form, Shape

IS_THERE, NEEDS_GRADIENT = 1, 2
ALIGNED = 64  # bytes, as torch's own memory: sums of MKL differ in the last bits where it is not


def num_bytes(forms: Sequence[Form]) -> int:
    """Of the buffer for such a message."""
    return _padded(len(forms)) + sum(_padded(form.num_bytes) for form in forms)


def pack(tensors: Sequence[Tensor | None], forms: Sequence[Form]) -> Tensor:
    """One buffer; raises if a tensor is not of the form that the other side expects."""
    buffer = torch.zeros(num_bytes(forms), dtype=torch.uint8)
    for number, (tensor, form, part) in enumerate(
        zip(tensors, forms, _parts(buffer, forms), strict=True)
    ):
        if tensor is not None:
            _check(tensor, form)
            buffer[number] = IS_THERE + NEEDS_GRADIENT * tensor.requires_grad
            part.copy_(tensor.detach())
    return buffer


def unpack(buffer: Tensor, forms: Sequence[Form]) -> list[Tensor | None]:
    """Views of the buffer, which lives as long as they do."""
    flags = buffer[: len(forms)].tolist()
    return [
        part.requires_grad_(bool(flag & NEEDS_GRADIENT)) if flag else None
        for flag, part in zip(flags, _parts(buffer, forms), strict=True)
    ]


def values_forms(shapes: Sequence[Shape]) -> list[Form]:
    """Of a message of values."""
    return [form for shape in shapes for form in shape.forms]


def values_tensors(contents: Mapping[Value, Any], values: Iterable[Value]) -> list[Tensor]:
    return [tensor for value in values for tensor in trees.tensors(contents[value])]


def values_again(
    found: Iterable[Tensor | None], values: Sequence[Value], shapes: Sequence[Shape]
) -> dict[Value, Any]:
    """The trees of values around the tensors that came."""
    rest = iter(found)
    return {
        value: pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, Form) else leaf for leaf in shape.leaves], shape.tree
        )
        for value, shape in zip(values, shapes, strict=True)
    }


def _parts(buffer: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    sizes = [_padded(form.num_bytes) for form in forms]
    starts = accumulate(sizes, initial=_padded(len(forms)))
    return [
        buffer[start : start + form.num_bytes].view(form.dtype).as_strided(form.shape, form.stride)
        for start, form in zip(starts, forms, strict=False)
    ]


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _check(tensor: Tensor, form: Form) -> None:
    if (tuple(tensor.shape), tensor.dtype) != (form.shape, form.dtype):
        raise ModelError(
            f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} is to be sent, but "
            f"from the batch's shapes {form.shape} and {form.dtype} follow: does a layer's output "
            "depend on data?"
        )
