"""Find the safetensors files at a path and the tensors in them, without reading the tensors.

    folder/model.safetensors
    folder/model.safetensors.index.json ── model-00001-of-00002.safetensors, …
    folder/anything.safetensors             if it is the only one

An index has the names of all tensors. So a process reads it, and the headers of those files that
have its own tensors.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from stageline.arguments import shown
from stageline.checkpoint.read_tensors import (
    StoredPiece,
    StoredTensor,
    size_of_file,
    tensor_places,
)
from stageline.checkpoint.record_file import RECORD
from stageline.checkpoint.write_tensors import METADATA
from stageline.errors import CheckpointError
from stageline.files import checked_path, read_json

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
MODEL_FILE, MODEL_INDEX = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
MAX_HEADER = 100_000_000  # bytes; safetensors itself refuses longer headers

AnyPath = str | os.PathLike[str]
Header = Mapping[str, StoredTensor]


class WeightFiles(NamedTuple):
    """The files with the tensors of a model."""

    path: str  # as errors show it
    file_of: Mapping[str, Path]  # of each tensor
    headers: Mapping[Path, Header]  # those that were read to know the names

    def stored(self, names: Iterable[str]) -> dict[str, StoredTensor]:
        """Return the places of these tensors; read the headers of their files."""
        headers = dict(self.headers)
        found = {}
        for name in names:
            path = self.file_of[name]
            if path not in headers:
                headers[path] = read_header(path)
            if name not in headers[path]:
                raise unusable(path, f"the index says that {name} is in it, but it is not")
            found[name] = headers[path][name]
        return found

    def checksum(self) -> int:
        """Return a number that differs if names or sizes of files differ."""
        sizes = {path: _size(path) for path in {*self.file_of.values()}}
        places = sorted((name, path.name, sizes[path]) for name, path in self.file_of.items())
        return zlib.crc32(repr(places).encode("utf-8", "surrogatepass"))


def find_weights(path: AnyPath | Sequence[AnyPath]) -> WeightFiles:
    """Return the files at a path: a folder, a file, an index, or a list of files."""
    if isinstance(path, list | tuple):
        return _from_files([checked_path(each, CheckpointError) for each in path])
    here = checked_path(path, CheckpointError)
    try:
        if here.is_dir():
            here = _choose_file(here)
        elif not here.exists():
            raise CheckpointError(
                f"{str(here)!r} does not exist: give a folder or a {SUFFIX} file on this machine; "
                "huggingface_hub.snapshot_download returns the folder of a model of the hub"
            )
    except OSError as error:  # for instance a name that is too long
        raise unusable(here, error) from error
    return _from_index(here) if here.suffix == ".json" else _from_files([here])


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file, after every number of its header was checked."""
    try:
        size = size_of_file(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ValueError(f"its {size} bytes are no safetensors file, or not all of one")
            fields = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(fields, dict):
            raise ValueError("its header has no names")
        fields.pop(METADATA, None)
        places = tensor_places(fields, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(path, error) from error
    return {
        name: StoredTensor(kind, (StoredPiece(path, start, kind, (0,) * len(kind.shape), None),))
        for name, (kind, start) in places.items()
    }


def unusable(path: AnyPath, cause: object) -> CheckpointError:
    """Return the error for files that no weights can be loaded from."""
    return CheckpointError(
        f"{os.fspath(path)!r} cannot be loaded: {cause}; nothing was changed: copy or download it "
        "again"
    )


def _choose_file(folder: Path) -> Path:
    """Return the file of a folder that has the weights, or the index of such files."""
    if (folder / RECORD).exists():
        raise CheckpointError(
            f"{str(folder)!r} is a checkpoint of sl.save: load it with sl.load, or write its "
            "weights with sl.export first"
        )
    for name in (MODEL_FILE, MODEL_INDEX):
        if os.path.lexists(folder / name):
            return folder / name
    names = sorted(path.name for path in folder.iterdir())
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) > 1:
            raise CheckpointError(
                f"{str(folder)!r} has {len(found)} files such as {found[0]!r}, and neither "
                f"{MODEL_FILE!r} nor {MODEL_INDEX!r}: give one file, or a list of files"
            )
        if found:
            return folder / found[0]
    raise CheckpointError(
        f"{str(folder)!r} has no {SUFFIX} file: give another folder; transformers converts files "
        "of other formats with from_pretrained and save_pretrained"
    )


def _from_files(paths: Sequence[Path]) -> WeightFiles:
    if not paths:
        raise CheckpointError("the list of files is empty: give at least one file")
    file_of: dict[str, Path] = {}
    headers = {}
    for path in paths:
        headers[path] = read_header(path)
        for name in headers[path]:
            if file_of.setdefault(name, path) != path:
                raise CheckpointError(
                    f"{name} is in {str(file_of[name])!r} and in {str(path)!r}: give files with "
                    "different tensors"
                )
    text = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    return WeightFiles(text, file_of, headers)


def _from_index(index: Path) -> WeightFiles:
    fields = read_json(index, CheckpointError)
    names = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(names, dict) or not names:
        raise unusable(index, "it has no weight_map with the file of each tensor")
    file_of = {name: index.parent / _checked_name(index, file) for name, file in names.items()}
    for path in dict.fromkeys(file_of.values()):
        _size(path)
    return WeightFiles(str(index), file_of, {})


def _size(path: Path) -> int:
    try:
        return size_of_file(path)
    except (OSError, ValueError) as error:
        raise unusable(path, error) from error


def _checked_name(index: Path, file: object) -> str:
    """Return a file name of an index; raise if it leads out of the index's folder.

    The file may be a link to another folder, as in the cache of the hub.
    """
    is_inside = isinstance(file, str) and file and "\0" not in file
    for kind in (PurePosixPath, PureWindowsPath) if is_inside else ():
        path = kind(str(file))
        is_inside = is_inside and not path.anchor and ".." not in path.parts
    if not is_inside:
        raise unusable(index, f"it names {shown(file)}, which is no file of its folder")
    return str(file)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise if a key is there twice."""
    return dict(_checked_pairs(pairs))


def _checked_pairs(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"its header has {key} twice")
        seen.add(key)
        yield key, value
