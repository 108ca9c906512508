"""Read tensors from the files of a checkpoint; none is used before its checksum was verified."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from stageline.checkpoint.write_tensors import (
    DTYPES,
    METADATA,
    OWN,
    Checksum,
    Shape,
    ShardFile,
    Size,
    TensorType,
    local_part,
    local_region,
    make_header,
    tensor_bytes,
)
from stageline.errors import CheckpointError

BLOCK = 2**24  # bytes per read where only the checksum is computed
MAX_CACHED = 2**28  # bytes that a reader keeps in memory between its two passes


class StoredPiece(NamedTuple):
    """A piece of a tensor in a file."""

    path: Path
    start: int
    type: TensorType
    offset: tuple[int, ...]
    crc32: int | None  # files of other programs have no checksums


class StoredTensor(NamedTuple):
    """A tensor in the files of a checkpoint, or in a file of another program."""

    type: TensorType
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class _Entry:
    """The header's entry of a tensor."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True)
class _Extra:
    """The fields that Stageline adds for a tensor in the header's metadata."""

    crc32: Checksum
    offset: Shape
    whole: Shape


_ENTRIES = TypeAdapter(dict[str, _Entry])
_EXTRAS = TypeAdapter(dict[str, _Extra])


def stored_tensors(folder: Path, files: Iterable[ShardFile]) -> dict[str, StoredTensor]:
    """Return the tensors in these files, from their headers, after every number was checked."""
    found: defaultdict[str, list[tuple[StoredPiece, tuple[int, ...]]]] = defaultdict(list)
    for file in files:
        path = folder / file.name
        try:
            for name, piece, whole in _pieces_in(path, file):
                found[name].append((piece, whole))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error
    return {name: _join_pieces(folder, name, pieces) for name, pieces in found.items()}


class TensorReader:
    """Reads tensors of a checkpoint in two passes: `verify` all of them, then `copy`.

    State: what the first pass keeps in memory, so that nothing can fail in the second. Beyond
    `MAX_CACHED` bytes it reads again, since a large model should not have to fit twice.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self.cache: dict[StoredPiece, Tensor] = {}
        self.space = MAX_CACHED

    def verify(self, targets: Mapping[str, Tensor]) -> None:
        """Compare the checksums of everything that `copy` will read; change no target.

        What has no checksum and does not fit in the cache is not read before `copy`.
        """
        for name, target in targets.items():
            for piece in self._needed_pieces(name, target):
                self._verify_piece(piece)

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the targets, which have the shapes of the stored tensors; convert their dtypes."""
        for name, target in targets.items():
            offset, shape = local_region(target)
            part = local_part(target)
            for piece in self._needed_pieces(name, target):
                overlap = _overlap(piece.offset, piece.type.shape, offset, shape)
                source = self.cache[piece] if piece in self.cache else _read(piece)
                there = _slices(overlap, piece.offset)
                part[_slices(overlap, offset)].copy_(source[there])

    def _verify_piece(self, piece: StoredPiece) -> None:
        try:
            if piece.type.num_bytes <= self.space:
                self.cache[piece] = _read(piece)
                self.space -= piece.type.num_bytes
            elif piece.crc32 is not None:
                _check(piece, checksum(piece))
        except OSError as error:
            raise damaged(piece.path, error) from error

    def _needed_pieces(self, name: str, target: Tensor) -> list[StoredPiece]:
        offset, shape = local_region(target)
        return [
            piece
            for piece in self.stored[name].pieces
            if all(a < b for a, b in _overlap(piece.offset, piece.type.shape, offset, shape))
        ]


def join_shards(
    stored: Mapping[str, StoredTensor], names: Iterable[Iterable[str]], path: Path
) -> None:
    """Write all tensors to one file, with one item of `names` in memory at a time."""
    types = {name: tensor.type for name, tensor in stored.items()}
    header, starts = make_header(types, {})
    with path.open("xb") as file:
        file.write(header)
        for batch in names:
            tensors = {name: types[name].empty() for name in batch}
            TensorReader(stored).copy(tensors)
            for name, tensor in tensors.items():
                file.seek(len(header) + starts[name])
                file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def damaged(path: Path, cause: object) -> CheckpointError:
    """Return the error for a damaged file."""
    return CheckpointError(
        f"{str(path)!r} is damaged: {cause}; nothing was changed: load another checkpoint, or "
        "another copy of the file"
    )


def _pieces_in(path: Path, file: ShardFile) -> Iterator[tuple[str, StoredPiece, tuple[int, ...]]]:
    """Yield name, piece and whole shape of each tensor in a file."""
    fields, extras = _read_header(path, file)
    if fields.keys() != extras.keys():
        raise ValueError("its header does not have a checksum for each tensor")
    for name, (kind, start) in tensor_places(fields, file.header_bytes, file.num_bytes).items():
        extra = extras[name]
        if not len(kind.shape) == len(extra.offset) == len(extra.whole) or any(
            o + s > w for o, s, w in zip(extra.offset, kind.shape, extra.whole, strict=True)
        ):
            raise ValueError(f"{name}, {kind}, cannot be at {extra.offset} of {extra.whole}")
        yield name, StoredPiece(path, start, kind, extra.offset, extra.crc32), extra.whole


def tensor_places(
    fields: Mapping[str, Any], header_bytes: int, num_bytes: int
) -> dict[str, tuple[TensorType, int]]:
    """Return the type and first byte of each tensor, from the header of a safetensors file.

    Raise `ValueError` unless the tensors fill the file, one after the other.
    """
    try:
        entries = _ENTRIES.validate_python(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"its header has no tensor at {where!r}: {problem['msg']}") from error
    places: dict[str, tuple[TensorType, int]] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry.dtype!r}")
        kind = TensorType(entry.shape, DTYPES[entry.dtype])
        start, stop = entry.data_offsets
        if start != end or stop - start != kind.num_bytes:
            raise ValueError(f"{name}, {kind}, cannot be at bytes {start} to {stop}")
        places[name] = kind, header_bytes + start
        end = stop
    if header_bytes + end != num_bytes:
        raise ValueError(f"its tensors end at byte {header_bytes + end} of {num_bytes}")
    return places


def size_of_file(path: Path) -> int:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a named pipe would block until somebody writes
        raise ValueError("it is not a regular file")
    return found.st_size


def _read_header(path: Path, file: ShardFile) -> tuple[dict[str, Any], dict[str, _Extra]]:
    size = size_of_file(path)
    if size != file.num_bytes or not 8 <= file.header_bytes <= file.num_bytes:
        raise ValueError(f"it has {size} bytes instead of {file.num_bytes}")
    with path.open("rb") as opened:
        header = opened.read(file.header_bytes)
    if zlib.crc32(header) != file.crc32:
        raise ValueError("the checksum of its header does not match")
    if int.from_bytes(header[:8], "little") != len(header) - 8:
        raise ValueError("the length of its header does not match")
    try:
        fields: dict[str, Any] = json.loads(header[8:])
        extras = json.loads(fields.pop(METADATA)[OWN])
        return fields, _EXTRAS.validate_python(extras)
    except (ValidationError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header was not written by sl.save: {error}") from error


def _join_pieces(
    folder: Path, name: str, pieces: Sequence[tuple[StoredPiece, tuple[int, ...]]]
) -> StoredTensor:
    """Return the tensor that the pieces make up; raise unless each element is there once."""
    stored = tuple(piece for piece, _ in pieces)
    whole = TensorType(pieces[0][1], stored[0].type.dtype)
    is_complete = (
        len({(*shape, piece.type.dtype) for piece, shape in pieces}) == 1
        and len({piece.offset for piece in stored}) == len(stored)
        and sum(prod(piece.type.shape) for piece in stored) == prod(whole.shape)
    )
    if not is_complete:
        raise damaged(folder, f"the pieces of {name} do not make up a tensor, {whole}")
    return StoredTensor(whole, stored)


def _read(piece: StoredPiece) -> Tensor:
    """Return a piece after its checksum, if it has one, was verified.

    The memory is bounded by the length of the file, which was checked with the header.
    """
    buffer = torch.empty(piece.type.num_bytes, dtype=torch.uint8)
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.start)
        view = buffer.numpy().data
        done = 0
        while done < len(view) and (count := file.readinto(view[done:])):
            done += count
    if piece.crc32 is not None:
        _check(piece, zlib.crc32(view[:done]))
    elif done < len(view):
        raise damaged(piece.path, f"it ends within the {piece.type} from byte {piece.start} on")
    return buffer.view(piece.type.dtype).reshape(piece.type.shape)


def checksum(piece: StoredPiece) -> int:
    """Return the CRC-32 of a piece, without having all of it in memory."""
    crc, left = 0, piece.type.num_bytes
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.start)
        while left and (block := file.read(min(left, BLOCK))):
            crc, left = zlib.crc32(block, crc), left - len(block)
    return crc


def _check(piece: StoredPiece, crc32: int) -> None:
    if crc32 != piece.crc32:
        stop = piece.start + piece.type.num_bytes
        raise damaged(
            piece.path,
            f"the checksum of bytes {piece.start} to {stop}, {piece.type}, does not match",
        )


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the overlap of two regions as (start, stop) in each dimension."""
    return [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(offset, shape, other, other_shape, strict=True)
    ]


def _slices(region: Iterable[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), o in zip(region, offset, strict=True))
