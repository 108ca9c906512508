"""Tensors read from the files of a checkpoint, none before it is known to be what was written."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from stageline.checkpoint.storage import (
    DTYPES,
    METADATA,
    OWN,
    Checksum,
    File,
    Form,
    Shape,
    Size,
    header_of,
    region_of,
    tensor_bytes,
)
from stageline.errors import CheckpointError
from stageline.runtime.engine.replicas import local

BLOCK = 2**24  # bytes that are read at a time where nothing is kept
HELD = 2**28  # bytes that a reader may keep in memory between its two passes


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
            offset, shape = region_of(target)
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
        offset, shape = region_of(target)
        return [
            stored
            for stored in self.saved[name].pieces
            if all(a < b for a, b in _overlap(stored.offset, stored.form.shape, offset, shape))
        ]


def join(saved: Mapping[str, Saved], names: Iterable[Iterable[str]], path: Path) -> None:
    """Write all tensors to one file. They are in memory one run of `names` at a time."""
    forms = {name: tensor.form for name, tensor in saved.items()}
    header, starts = header_of(forms, {})
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


def damaged(path: Path, cause: object) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is damaged: {cause}; nothing was changed: load another checkpoint by its "
        "path"
    )


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
