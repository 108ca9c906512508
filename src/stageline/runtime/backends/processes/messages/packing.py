"""Pack the tensors of a message into one buffer, and unpack them.

    [ time, digest of the specs, for each tensor flags, offset and strides ][ tensor ][ tensor ] …

Each tensor begins at a multiple of 64 bytes. Both sides know the specs of the tensors; the digest
detects if they disagree. The time is when the message was packed. Flags say whether a tensor is
present (a gradient may be None), whether it needs a gradient, whether it shares its memory with
another one, and whether its strides or alignment differ from its spec. In that case the receiver
copies it to the same strides and alignment: the last bits of results depend on them.
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
from stageline.model import trees
from stageline.model.layers import Value
from stageline.runtime.backends.processes.clock import SHIFT
from stageline.runtime.backends.processes.messages.shapes import TensorSpec, ValueSpec
from stageline.runtime.exactness.strided_copy import ALIGNED, copy_as, misalignment

IS_PRESENT, NEEDS_GRADIENT, IS_ALIASED, HAS_LAYOUT = 1, 2, 4, 8
NUM_TAGS = 1 << 20


class Unpacked(NamedTuple):
    """The tensors of a message."""

    tensors: list[Tensor | None]
    sent_at: float
    aliased: list[int]  # positions of tensors that shared their memory with others


@dataclass(frozen=True)
class Packing:
    """The position of each tensor in a buffer, whose dtype is that of the tensors if they have one.

    Packing makes few and cheap calls: after some milliseconds of other work each call costs several
    times its usual.
    """

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]  # in elements of the buffer
    dtype: torch.dtype
    length: int
    head: struct.Struct
    digest: int  # of the specs

    @staticmethod
    def of(specs: Sequence[TensorSpec]) -> Packing:
        head = struct.Struct(f"dI{2 * len(specs)}B{sum(len(spec.shape) for spec in specs)}q")
        *ends, size = accumulate([head.size, *(spec.num_bytes for spec in specs)], _next_end)
        dtypes = {spec.dtype for spec in specs}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        width = dtype.itemsize
        starts = tuple(padded(end) // width for end in ends)
        digest = crc32(repr(specs).encode())
        return Packing(tuple(specs), starts, dtype, padded(size) // width, head, digest)

    @property
    def tag(self) -> int:
        """A tag by length: gloo aborts if a receive matches a message of another length."""
        return 2 + self.num_bytes // ALIGNED % NUM_TAGS

    def empty(self) -> Tensor:
        return torch.empty(self.length, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.length * self.dtype.itemsize

    def pack(
        self,
        tensors: Sequence[Tensor | None],
        aliased: Container[int] = (),
        buffer: Tensor | None = None,
    ) -> Tensor:
        """Return the tensors in one buffer; raise `ModelError` if one does not match its spec.

        `aliased` are the positions of tensors that share their memory with others.
        """
        buffer = self.empty() if buffer is None else buffer
        flags, offsets, strides = list[int](), list[int](), list[int]()
        for position, (tensor, spec) in enumerate(zip(tensors, self.specs, strict=True)):
            flag = offset = 0
            stride = spec.stride
            if tensor is not None:
                check_tensor(tensor, spec)
                stride, offset = tensor.stride(), misalignment(tensor)
                flag = IS_PRESENT + NEEDS_GRADIENT * tensor.requires_grad
                flag += IS_ALIASED * (position in aliased)
                flag += HAS_LAYOUT * (stride != spec.stride or offset != 0)
                self._view(buffer, spec, self.starts[position]).copy_(tensor.detach())
            flags.append(flag)
            offsets.append(offset)
            strides += stride
        head = self.head.pack(perf_counter() + SHIFT, self.digest, *flags, *offsets, *strides)
        memmove(buffer.data_ptr(), head, len(head))
        return buffer

    def unpack(self, buffer: Tensor) -> Unpacked:
        """Return views of the buffer, or copies where the layout differs from the spec."""
        time, digest, *rest = self.head.unpack(string_at(buffer.data_ptr(), self.head.size))
        if digest != self.digest:
            raise BatchError(
                "a received message does not match the shapes predicted from this rank's batch, "
                f"{', '.join(str(spec.shape) for spec in self.specs)}: do all ranks have batches "
                "of the same shapes and dtypes?"
            )
        count = len(self.specs)
        flags, offsets, strides = rest[:count], rest[count : 2 * count], iter(rest[2 * count :])
        tensors: list[Tensor | None] = []
        for flag, offset, spec, start in zip(flags, offsets, self.specs, self.starts, strict=True):
            stride = [next(strides) for _ in spec.shape]
            tensor = None
            if flag:
                # `data` counts changes in place for itself, not for all tensors of the buffer
                tensor = self._view(buffer, spec, start).data
                tensor = copy_as(tensor, stride, offset) if flag & HAS_LAYOUT else tensor
                tensor.requires_grad_(bool(flag & NEEDS_GRADIENT))
            tensors.append(tensor)
        aliased = [position for position, flag in enumerate(flags) if flag & IS_ALIASED]
        return Unpacked(tensors, min(perf_counter(), time - SHIFT), aliased)

    def _view(self, buffer: Tensor, spec: TensorSpec, start: int) -> Tensor:
        if spec.dtype is not self.dtype:
            return (
                buffer[start : start + spec.num_bytes]
                .view(spec.dtype)
                .as_strided(spec.shape, spec.stride)
            )
        return buffer.as_strided(spec.shape, spec.stride, start)


def specs_of_values(specs: Sequence[ValueSpec]) -> list[TensorSpec]:
    """Return the tensor specs of a message of several values."""
    return [spec for value in specs for spec in value.tensor_specs]


def tensors_of_values(
    contents: Mapping[Value, Any], values: Sequence[Value], specs: Sequence[ValueSpec] | None
) -> list[Tensor]:
    """Return the tensors of several values in order; check them if their specs are predicted."""
    if specs is None:
        return [tensor for value in values for tensor in trees.tensors(contents[value])]
    pairs = zip(values, specs, strict=True)
    return [tensor for value, spec in pairs for tensor in spec.tensors(contents[value])]


def rebuild_values(
    tensors: Iterable[Tensor | None], values: Sequence[Value], specs: Sequence[ValueSpec]
) -> dict[Value, Any]:
    """Return several values with the tensors that were received."""
    rest = iter(tensors)
    return {value: spec.rebuild(rest) for value, spec in zip(values, specs, strict=True)}


def _next_end(end: int, size: int) -> int:
    return padded(end) + size


def padded(size: int) -> int:
    """Return where the next tensor begins, behind one that ends at this byte."""
    return -(-size // ALIGNED) * ALIGNED


def check_tensor(tensor: Tensor, spec: TensorSpec) -> None:
    """Raise `ModelError` if a tensor to be sent has another shape or type than was predicted."""
    if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
        raise ModelError(
            f"a tensor to be sent has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but "
            f"{spec.shape} and {spec.dtype} were predicted from the batch's shapes: does the shape "
            "of a layer's output depend on data?"
        )
