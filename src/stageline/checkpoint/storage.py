"""Tensors in safetensors files, one for each process, with a checksum for each tensor.

    checkpoint.json ── checksum of each file's header ── checksum of each tensor in it

So nothing of a file is believed that was not written by `sl.save`, and a process reads only the
tensors that it needs. Nothing in these files is ever executed. Tensors that several processes hold
together, DTensors, are written in pieces and read as the reader has them.

The checksum is CRC-32: it sees every change of up to 3 bits and every run of up to 32, and misses
one in 4 billion of all others. On a 2-core EPYC, 300 MB of random bytes: crc32 3.3 GB/s, sha256
1.7, blake2b 0.8; disks are slower than the first and not than the last.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from stageline.errors import CheckpointError
from stageline.runtime.peers import local

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
BLOCK = 2**24  # bytes that are read at a time where nothing is kept
HELD = 2**28  # bytes that a reader may keep in memory between its two passes

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


class Stored(NamedTuple):
    """A piece in a file."""

    path: Path
    start: int
    form: Form
    offset: tuple[int, ...]
    crc32: int


class Saved(NamedTuple):
    """A tensor in the files of a checkpoint."""

    form: Form
    pieces: tuple[Stored, ...]


@dataclass(frozen=True)
class _Entry:
    """Of the header, for a tensor."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True)
class _Own:
    """What we add to that."""

    crc32: Checksum
    offset: Shape
    whole: Shape


_ENTRIES = TypeAdapter(dict[str, _Entry])
_OWN = TypeAdapter(dict[str, _Own])


def pieces_of(tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Piece]:
    """Return what this process holds of each, on the CPU; `copy` is for a save in background."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in CODES:
            raise CheckpointError(
                f"{name} is {tensor.layout} of {tensor.dtype}, but a checkpoint holds dense "
                f"tensors of {', '.join(DTYPES)}: convert it, or keep it out of the state"
            )
        offset, shape = _region(tensor)
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
    header, starts = _header(forms, own)
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


def saved_in(folder: Path, files: Iterable[File]) -> dict[str, Saved]:
    """Return what the files hold, from their headers, of which every number is checked."""
    found: defaultdict[str, list[tuple[Stored, tuple[int, ...]]]] = defaultdict(list)
    for file in files:
        path = folder / file.name
        try:
            for name, stored, whole in _stored(path, file):
                found[name].append((stored, whole))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error
    return {name: _joined(folder, name, pieces) for name, pieces in found.items()}


class Reader:
    """Reads tensors of a checkpoint in two passes: `verify` all of them, then `copy`.

    State: what the first pass keeps in memory, so that the second has nothing left that can fail.
    Beyond `HELD` bytes it reads again, since a large model should not have to fit twice.
    """

    def __init__(self, saved: Mapping[str, Saved]) -> None:
        self.saved = saved
        self.held: dict[Stored, Tensor] = {}
        self.room = HELD

    def verify(self, targets: Mapping[str, Tensor]) -> None:
        """Compare the checksums of all that `copy` would read; no target is changed."""
        for name, target in targets.items():
            for stored in self._needed(name, target):
                self._verify(stored)

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the targets, whose forms have to be those of `saved`."""
        for name, target in targets.items():
            offset, shape = _region(target)
            part = local(target.detach())
            for stored in self._needed(name, target):
                overlap = _overlap(stored.offset, stored.form.shape, offset, shape)
                source = self.held[stored] if stored in self.held else _read(stored)
                there = _slices(overlap, stored.offset)
                part[_slices(overlap, offset)].copy_(source[there])

    def _verify(self, stored: Stored) -> None:
        try:
            if stored.form.num_bytes <= self.room:
                self.held[stored] = _read(stored)
                self.room -= stored.form.num_bytes
            else:
                _check(stored, _checksum(stored))
        except OSError as error:
            raise damaged(stored.path, error) from error

    def _needed(self, name: str, target: Tensor) -> list[Stored]:
        offset, shape = _region(target)
        return [
            stored
            for stored in self.saved[name].pieces
            if all(a < b for a, b in _overlap(stored.offset, stored.form.shape, offset, shape))
        ]


def check_all_there(folder: Path, files: Iterable[File]) -> None:
    """Raise unless this process sees the files as those who wrote them do."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"{str(folder)!r} has no whole {file.name} where the first process looks, but "
                "another one wrote it: write to a folder that all processes share"
            )


def join(saved: Mapping[str, Saved], names: Iterable[Iterable[str]], path: Path) -> None:
    """Write all tensors to one file. They are in memory one run of `names` at a time."""
    forms = {name: tensor.form for name, tensor in saved.items()}
    header, starts = _header(forms, {})
    with path.open("xb") as file:
        file.write(header)
        for run in names:
            tensors = {name: forms[name].empty() for name in run}
            Reader(saved).copy(tensors)
            for name, tensor in tensors.items():
                file.seek(len(header) + starts[name])
                file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def tensor_bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def damaged(path: Path, cause: object) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is damaged: {cause}; nothing was changed: load another checkpoint by its "
        "path"
    )


def refusal(folder: Path, cause: BaseException, where: str = "") -> CheckpointError:
    return CheckpointError(
        f"{where}{str(folder)!r} could not be written to: {type(cause).__name__}: {cause}; what "
        "was there before is as it was: make room, or write elsewhere"
    )


def _header(
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


def _stored(path: Path, file: File) -> Iterator[tuple[str, Stored, tuple[int, ...]]]:
    """Yield the pieces of a file, by name, with the shape of the whole."""
    entries, own = _parsed(path, file)
    if entries.keys() != own.keys():
        raise ValueError("its header has not a checksum for each tensor")
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} is of the unknown type {entry.dtype!r}")
        form, part = Form(entry.shape, DTYPES[entry.dtype]), own[name]
        start, stop = entry.data_offsets
        if start != end or stop - start != form.num_bytes:
            raise ValueError(f"{name}, {form}, is said to be at bytes {start} to {stop}")
        if not len(entry.shape) == len(part.offset) == len(part.whole) or any(
            o + s > w for o, s, w in zip(part.offset, entry.shape, part.whole, strict=True)
        ):
            raise ValueError(f"{name}, {form}, is said to be at {part.offset} of {part.whole}")
        yield (
            name,
            Stored(path, file.header_bytes + start, form, part.offset, part.crc32),
            (part.whole),
        )
        end = stop
    if file.header_bytes + end != file.num_bytes:
        raise ValueError(f"its tensors end at byte {file.header_bytes + end} of {file.num_bytes}")


def _parsed(path: Path, file: File) -> tuple[dict[str, _Entry], dict[str, _Own]]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for somebody to write
        raise ValueError("it is not a file")
    if found.st_size != file.num_bytes or not 8 <= file.header_bytes <= file.num_bytes:
        raise ValueError(f"it has {found.st_size} bytes instead of {file.num_bytes}")
    with path.open("rb") as opened:
        header = opened.read(file.header_bytes)
    if zlib.crc32(header) != file.crc32:
        raise ValueError("its header has another checksum than it was written with")
    if int.from_bytes(header[:8], "little") != len(header) - 8:
        raise ValueError("its header has another length than it says")
    try:
        fields = json.loads(header[8:])
        own = json.loads(fields.pop(METADATA)[OWN])
        return _ENTRIES.validate_python(fields), _OWN.validate_python(own)
    except (ValidationError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not of sl.save: {error}") from error


def _joined(folder: Path, name: str, pieces: Sequence[tuple[Stored, tuple[int, ...]]]) -> Saved:
    """Return the tensor that the pieces make up; each element has to be there once."""
    stored = tuple(piece for piece, _ in pieces)
    whole = Form(pieces[0][1], stored[0].form.dtype)
    is_whole = (
        len({(*shape, piece.form.dtype) for piece, shape in pieces}) == 1
        and len({piece.offset for piece in stored}) == len(stored)
        and sum(prod(piece.form.shape) for piece in stored) == prod(whole.shape)
    )
    if not is_whole:
        raise damaged(folder, f"the pieces of {name} do not make up a tensor, {whole}")
    return Saved(whole, stored)


def _read(stored: Stored) -> Tensor:
    """Return it, if it is what was written. The file was long enough when it was opened."""
    buffer = torch.empty(stored.form.num_bytes, dtype=torch.uint8)
    with stored.path.open("rb", buffering=0) as file:
        file.seek(stored.start)
        view = buffer.numpy().data
        done = 0
        while done < len(view) and (count := file.readinto(view[done:])):
            done += count
    _check(stored, zlib.crc32(view[:done]))
    return buffer.view(stored.form.dtype).reshape(stored.form.shape)


def _checksum(stored: Stored) -> int:
    crc, left = 0, stored.form.num_bytes
    with stored.path.open("rb", buffering=0) as file:
        file.seek(stored.start)
        while left and (block := file.read(min(left, BLOCK))):
            crc, left = zlib.crc32(block, crc), left - len(block)
    return crc


def _check(stored: Stored, crc32: int) -> None:
    if crc32 != stored.crc32:
        stop = stored.start + stored.form.num_bytes
        raise damaged(
            stored.path,
            f"bytes {stored.start} to {stop}, {stored.form}, have another checksum than they were "
            "written with",
        )


def _region(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and shape of what this process holds of a tensor."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    try:
        (chunk,) = tensor.__create_chunk_list__()
    except RuntimeError as error:  # sums that are not summed up yet
        raise CheckpointError(f"a tensor of {tuple(tensor.shape)} has no parts: {error}") from error
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], its_shape: Sequence[int]
) -> list[tuple[int, int]]:
    """Return where two regions overlap, from and to in each dimension."""
    return [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(offset, shape, other, its_shape, strict=True)
    ]


def _slices(region: Iterable[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), o in zip(region, offset, strict=True))
