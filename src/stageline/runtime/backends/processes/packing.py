"""Messages between processes: one buffer of bytes each.

    [ time, digest of the forms, for each tensor flags, lead and strides ][ tensor ][ tensor ] …

Each tensor begins at a multiple of 64 bytes. Both sides know the forms of the tensors; the digest
is there in case that they disagree. The time is when it was packed. Flags say whether the tensor
is there (a gradient may be None), whether it needs a gradient, whether it shares its memory with
another one, and whether it had other strides or another alignment than its form. These are told
then, and the other side gives it the same: results depend on them in their last bits.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from ctypes import memmove, string_at
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from stageline.errors import BatchError, ModelError
from stageline.model.layers import Value
from stageline.runtime import trees
from stageline.runtime.backends.processes.clock import SHIFT
from stageline.runtime.backends.processes.message_shapes import Form, Shape
from stageline.runtime.exactness.strided_copy import ALIGNED, copy_as, misalignment

IS_THERE, NEEDS_GRADIENT, IS_ALIASED, HAS_LAYOUT = 1, 2, 4, 8
NUM_TAGS = 1 << 20


class Unpacked(NamedTuple):
    """What a message held."""

    tensors: list[Tensor | None]
    sent_at: float
    aliased: list[int]  # positions of tensors that shared their memory with others


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
        head = struct.Struct(f"dI{2 * len(forms)}B{sum(len(form.shape) for form in forms)}q")
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

    def pack(self, tensors: Sequence[Tensor | None], aliased: Container[int] = ()) -> Tensor:
        """One buffer; raises if a tensor is not of the form that the other side expects.

        `aliased` are the positions of tensors that share their memory with others.
        """
        buffer = torch.empty(self.length, dtype=self.dtype)
        flags, leads, strides = list[int](), list[int](), list[int]()
        for position, (tensor, form) in enumerate(zip(tensors, self.forms, strict=True)):
            flag = lead = 0
            stride = form.stride
            if tensor is not None:
                _check(tensor, form)
                stride, lead = tensor.stride(), misalignment(tensor)
                flag = IS_THERE + NEEDS_GRADIENT * tensor.requires_grad
                flag += IS_ALIASED * (position in aliased)
                flag += HAS_LAYOUT * (stride != form.stride or lead != 0)
                self._part(buffer, form, self.starts[position]).copy_(tensor.detach())
            flags.append(flag)
            leads.append(lead)
            strides += stride
        head = self.head.pack(perf_counter() + SHIFT, self.digest, *flags, *leads, *strides)
        memmove(buffer.data_ptr(), head, len(head))
        return buffer

    def unpack(self, buffer: Tensor) -> Unpacked:
        """Views of the buffer, which lives as long as they do, but for tensors of other layouts."""
        time, digest, *rest = self.head.unpack(string_at(buffer.data_ptr(), self.head.size))
        if digest != self.digest:
            raise BatchError(
                "a message came that is not of the form that follows from the batch of this rank, "
                f"{', '.join(str(form.shape) for form in self.forms)}: do all ranks have batches "
                "of the same shapes and types?"
            )
        count = len(self.forms)
        flags, leads, strides = rest[:count], rest[count : 2 * count], iter(rest[2 * count :])
        tensors: list[Tensor | None] = []
        for flag, lead, form, start in zip(flags, leads, self.forms, self.starts, strict=True):
            stride = [next(strides) for _ in form.shape]
            tensor = None
            if flag:
                # `data` counts changes in place for itself, not for all tensors of the buffer
                tensor = self._part(buffer, form, start).data
                tensor = copy_as(tensor, stride, lead) if flag & HAS_LAYOUT else tensor
                tensor.requires_grad_(bool(flag & NEEDS_GRADIENT))
            tensors.append(tensor)
        aliased = [position for position, flag in enumerate(flags) if flag & IS_ALIASED]
        return Unpacked(tensors, min(perf_counter(), time - SHIFT), aliased)

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
