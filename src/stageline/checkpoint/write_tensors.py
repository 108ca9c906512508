"""Write tensors to safetensors files, one per process, with a checksum for each tensor.

    checkpoint.json ── checksum of each file's header ── checksum of each tensor in it

So nothing is read that `sl.save` did not write, and a process reads only the tensors it needs.
Nothing in these files is ever executed. Each process writes its own parts of a DTensor; a process
that reads it may have other parts.

The checksum is CRC-32. It detects every flipped bit and every burst of damage of up to 32 bits, and
misses one in 4 billion of all other kinds of damage; it does not protect against an attacker. On
one core of an EPYC, for 300 MB of random bytes: crc32 3.3 GB/s, sha256 1.7, blake2b 0.8.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from stageline.errors import CheckpointError
from stageline.runtime.engine.replicas import local

# by their names in the safetensors format
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA, OWN = "__metadata__", "stageline"  # keys of a header

Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Checksum = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Shape = Annotated[tuple[Size, ...], Field(max_length=64)]


class TensorType(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorType:
        return TensorType(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class Piece(NamedTuple):
    """A tensor, or the part of a DTensor that this process has, ready to be written."""

    tensor: Tensor  # on the CPU, contiguous
    offset: tuple[int, ...]  # of this part in the whole tensor
    whole: tuple[int, ...]  # the shape of the whole tensor

    @property
    def bytes(self) -> memoryview:
        return tensor_bytes(self.tensor)


@dataclass(frozen=True)
class ShardFile:
    """The entry of a file in the checkpoint's record."""

    name: Annotated[str, Field(pattern=r"^shard-\d{5,9}\.safetensors$")]
    num_bytes: Size
    header_bytes: Size  # including the 8 bytes of its length
    crc32: Checksum  # of the header


def shard_name(process: int) -> str:
    return f"shard-{process + 1:05d}.safetensors"


def local_pieces(tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Piece]:
    """Return this process's part of each tensor on the CPU; background saves need a `copy`."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in CODES:
            raise CheckpointError(
                f"{name} is {tensor.layout} of {tensor.dtype}, but a checkpoint stores dense "
                f"tensors of {', '.join(DTYPES)}: convert it, or keep it out of the state"
            )
        offset, shape = local_region(tensor)
        if prod(shape) == 0 and tensor.numel():
            continue  # other processes have all of it
        held = local_part(tensor)
        here = held.resolve_conj().resolve_neg().to("cpu").contiguous()
        if copy and here.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            here = here.clone()
        found[name] = Piece(here, offset, tuple(tensor.shape))
    return found


def write_shard(
    path: Path, pieces: Mapping[str, Piece], *, is_plain: bool = False
) -> dict[str, Any]:
    """Write a file and return the fields of its `ShardFile`; a plain one has no checksums."""
    types = {name: TensorType.of(piece.tensor) for name, piece in pieces.items()}
    own = {
        name: {"crc32": zlib.crc32(piece.bytes), "offset": piece.offset, "whole": piece.whole}
        for name, piece in (() if is_plain else pieces.items())
    }
    header, starts = make_header(types, own)
    with path.open("xb") as file:
        file.write(header)
        for name in starts:
            file.write(pieces[name].bytes)
        end = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return {
        "name": path.name,
        "num_bytes": end,
        "header_bytes": len(header),
        "crc32": zlib.crc32(header),
    }


def check_visible(folder: Path, files: Iterable[ShardFile]) -> None:
    """Raise unless this process sees the files that other processes wrote."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"the first process does not see a complete {file.name} in {str(folder)!r}, which "
                "another process wrote: write to a folder that all processes share"
            )


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Raise `CheckpointError` for errors of the file system while `path` is written."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise CheckpointError(
            f"{str(path)!r} could not be written: {type(error).__name__}: {error}; existing "
            "files were not changed: free some space, or write to another place"
        ) from error


def tensor_bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def make_header(
    types: Mapping[str, TensorType], own: Mapping[str, Mapping[str, object]]
) -> tuple[bytes, dict[str, int]]:
    """Return the header and the offset of each tensor behind it, in the order of the file.

    Tensors with large elements come first, so that all of them are aligned.
    """
    starts: dict[str, int] = {}
    metadata = {"format": "pt"} | ({OWN: json.dumps(own)} if own else {})
    fields: dict[str, object] = {METADATA: metadata}
    end = 0
    for name in sorted(types, key=lambda name: (-types[name].dtype.itemsize, name)):
        starts[name], end = end, end + types[name].num_bytes
        fields[name] = {
            "dtype": CODES[types[name].dtype],
            "shape": types[name].shape,
            "data_offsets": (starts[name], end),
        }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, or all of another tensor, detached."""
    return local(tensor.detach())


def local_region(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and shape of this process's part of a tensor."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    try:
        (chunk,) = tensor.__create_chunk_list__()
    except RuntimeError as error:  # for instance a DTensor with pending partial sums
        raise CheckpointError(
            f"a DTensor of shape {tuple(tensor.shape)} cannot be saved in parts: {error}"
        ) from error
    return tuple(chunk.offsets), tuple(chunk.sizes)
