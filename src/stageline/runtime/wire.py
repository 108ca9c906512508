"""Messages between processes: one buffer of bytes each.

    [ time, digest of the forms, a flag for each tensor ][ tensor ][ tensor ] …

Each tensor begins at a multiple of 64 bytes. Both sides know the forms of the tensors; the digest
is there in case that they disagree. The time is when it was packed. A flag says whether the tensor
is there (a gradient may be None) and whether it needs a gradient.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from ctypes import memmove, string_at
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from stageline.errors import BatchError, ModelError
from stageline.model.layers import Value
from stageline.runtime import trees
from stageline.runtime.clock import SHIFT
from stageline.runtime.shapes import Form, Shape

IS_THERE, NEEDS_GRADIENT = 1, 2
ALIGNED = 64  # bytes, as torch's own memory: sums of MKL differ in the last bits where it is not
NUM_TAGS = 1 << 20


@dataclass(frozen=True)
class Packing:
    """Where each tensor of a message lies, in a buffer of the tensors' own type if they have one.

    Few and cheap calls: after some milliseconds of other work each costs several times its usual.
    """

    forms: tuple[Form, ...]
    starts: tuple[int, ...]  # in elements of the buffer
    dtype: torch.dtype
    length: int
    head: struct.Struct
    digest: int  # of the forms

    @staticmethod
    def of(forms: Sequence[Form]) -> Packing:
        head = struct.Struct(f"dI{len(forms)}B")
        *starts, size = accumulate([head.size, *(form.num_bytes for form in forms)], _beyond)
        kinds = {form.dtype for form in forms}
        dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
        width = dtype.itemsize
        places = tuple(_padded(start) // width for start in starts)
        digest = crc32(repr(forms).encode())
        return Packing(tuple(forms), places, dtype, _padded(size) // width, head, digest)

    @property
    def tag(self) -> int:
        """Messages of different lengths never meet: gloo aborts the process if they do."""
        return 2 + self.length * self.dtype.itemsize // ALIGNED % NUM_TAGS

    def empty(self) -> Tensor:
        return torch.empty(self.length, dtype=self.dtype)

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """One buffer; raises if a tensor is not of the form that the other side expects."""
        buffer = torch.empty(self.length, dtype=self.dtype)
        flags = []
        for tensor, form, start in zip(tensors, self.forms, self.starts, strict=True):
            if tensor is None:
                flags.append(0)
            else:
                _check(tensor, form)
                flags.append(IS_THERE + NEEDS_GRADIENT * tensor.requires_grad)
                self._part(buffer, form, start).copy_(tensor.detach())
        head = self.head.pack(perf_counter() + SHIFT, self.digest, *flags)
        memmove(buffer.data_ptr(), head, len(head))
        return buffer

    def unpack(self, buffer: Tensor) -> tuple[list[Tensor | None], float]:
        """Views of the buffer, which lives as long as they do; and when it was packed."""
        time, digest, *flags = self.head.unpack(string_at(buffer.data_ptr(), self.head.size))
        if digest != self.digest:
            raise BatchError(
                "a message came that is not of the form that follows from the batch of this rank, "
                f"{', '.join(str(form.shape) for form in self.forms)}: do all ranks have batches "
                "of the same shapes and types?"
            )
        tensors = [
            self._part(buffer, form, start).requires_grad_(flag > IS_THERE) if flag else None
            for flag, form, start in zip(flags, self.forms, self.starts, strict=True)
        ]
        return tensors, min(perf_counter(), time - SHIFT)

    def _part(self, buffer: Tensor, form: Form, start: int) -> Tensor:
        if form.dtype is not self.dtype:
            return (
                buffer[start : start + form.num_bytes]
                .view(form.dtype)
                .as_strided(form.shape, form.stride)
            )
        return buffer.as_strided(form.shape, form.stride, start)


def values_forms(shapes: Sequence[Shape]) -> list[Form]:
    """Of a message of values."""
    return [form for shape in shapes for form in shape.forms]


def values_tensors(
    contents: Mapping[Value, Any], values: Sequence[Value], shapes: Sequence[Shape] | None
) -> list[Tensor]:
    """In the order of the values; their shapes are checked, if they were foreseen."""
    if shapes is None:
        return [tensor for value in values for tensor in trees.tensors(contents[value])]
    pairs = zip(values, shapes, strict=True)
    return [tensor for value, shape in pairs for tensor in shape.tensors(contents[value])]


def values_again(
    found: Iterable[Tensor | None], values: Sequence[Value], shapes: Sequence[Shape]
) -> dict[Value, Any]:
    """The trees of values around the tensors that came."""
    rest = iter(found)
    return {value: shape.around(rest) for value, shape in zip(values, shapes, strict=True)}


def _beyond(end: int, size: int) -> int:
    return _padded(end) + size


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _check(tensor: Tensor, form: Form) -> None:
    if tensor.shape != form.shape or tensor.dtype is not form.dtype:
        raise ModelError(
            f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} is to be sent, but "
            f"from the batch's shapes {form.shape} and {form.dtype} follow: does a layer's output "
            "depend on data?"
        )
