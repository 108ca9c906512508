"""Tensors in safetensors files, one for each process, with a checksum for each tensor.

    checkpoint.json ── checksum of each file's header ── checksum of each tensor in it

So nothing of a file is believed that was not written by `sl.save`, and a process reads only the
tensors that it needs. Nothing in these files is ever executed. Tensors that several processes hold
together, DTensors, are written in pieces and read as the reader has them.

The checksum is CRC-32. It sees every flipped bit and every run of damage of up to 32 bits, and
misses one in 4 billion of all other damage; against people who mean harm it is no help. On one core
of an EPYC, for 300 MB of random bytes: crc32 3.3 GB/s, sha256 1.7, blake2b 0.8.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from stageline.errors import CheckpointError
from stageline.runtime.engine.replicas import local

# as the format spells them
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


class Form(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Form:
        return Form(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class Piece(NamedTuple):
    """A tensor, or the part of it that this process holds, as a file takes it."""

    tensor: Tensor  # on the CPU, contiguous
    offset: tuple[int, ...]  # of this part in the whole
    whole: tuple[int, ...]  # the shape of the whole

    @property
    def bytes(self) -> memoryview:
        return tensor_bytes(self.tensor)


@dataclass(frozen=True)
class File:
    """What the record of a checkpoint says of one of its files."""

    name: Annotated[str, Field(pattern=r"^shard-\d{5,9}\.safetensors$")]
    num_bytes: Size
    header_bytes: Size  # with the 8 that are its length
    crc32: Checksum  # of these


def pieces_of(tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Piece]:
    """Return what this process holds of each, on the CPU; `copy` is for a save in background."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in CODES:
            raise CheckpointError(
                f"{name} is {tensor.layout} of {tensor.dtype}, but a checkpoint holds dense "
                f"tensors of {', '.join(DTYPES)}: convert it, or keep it out of the state"
            )
        offset, shape = region_of(tensor)
        if prod(shape) == 0 and tensor.numel():
            continue  # others hold all of it
        held = local(tensor.detach())
        here = held.resolve_conj().resolve_neg().to("cpu").contiguous()
        if copy and here.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            here = here.clone()
        found[name] = Piece(here, offset, tuple(tensor.shape))
    return found


def write(path: Path, pieces: Mapping[str, Piece], *, is_plain: bool = False) -> dict[str, Any]:
    """Write a file, and return the fields of its `File`; a plain one is for other programs."""
    forms = {name: Form.of(piece.tensor) for name, piece in pieces.items()}
    own = {
        name: {"crc32": zlib.crc32(piece.bytes), "offset": piece.offset, "whole": piece.whole}
        for name, piece in (() if is_plain else pieces.items())
    }
    header, starts = header_of(forms, own)
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


def check_all_there(folder: Path, files: Iterable[File]) -> None:
    """Raise unless this process sees the files as those who wrote them do."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"{str(folder)!r} has no whole {file.name} where the first process looks, but "
                "another one wrote it: write to a folder that all processes share"
            )


def tensor_bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def refusal(folder: Path, cause: BaseException, where: str = "") -> CheckpointError:
    return CheckpointError(
        f"{where}{str(folder)!r} could not be written to: {type(cause).__name__}: {cause}; what "
        "was there before is as it was: make room, or write elsewhere"
    )


def header_of(
    forms: Mapping[str, Form], own: Mapping[str, Mapping[str, object]]
) -> tuple[bytes, dict[str, int]]:
    """Return it and, in the order of the file, where each tensor starts behind it.

    Large elements come first, so that all of them are aligned.
    """
    starts: dict[str, int] = {}
    metadata = {"format": "pt"} | ({OWN: json.dumps(own)} if own else {})
    fields: dict[str, object] = {METADATA: metadata}
    end = 0
    for name in sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name)):
        starts[name], end = end, end + forms[name].num_bytes
        fields[name] = {
            "dtype": CODES[forms[name].dtype],
            "shape": forms[name].shape,
            "data_offsets": (starts[name], end),
        }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def region_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and shape of what this process holds of a tensor."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    try:
        (chunk,) = tensor.__create_chunk_list__()
    except RuntimeError as error:  # sums that are not summed up yet
        raise CheckpointError(f"a tensor of {tuple(tensor.shape)} has no parts: {error}") from error
    return tuple(chunk.offsets), tuple(chunk.sizes)
