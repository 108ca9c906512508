"""Checkpoints in a folder: each is complete, or not there.

    run/step-00000100/checkpoint.json, shard-00001.safetensors, …
    run/step-00000200.partial/         being written, being deleted, or left by a crash
    run/step-00000100.old.partial/     making room for another save of the same step

A checkpoint gets its name when all of it is written, and loses it before any of it is deleted. What
has other names is not ours: it is neither read nor deleted. Who writes a folder holds a lock on it,
which ends with the process, so what a crash left can be told from what another process is writing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

from stageline.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

RECORD = "checkpoint.json"
FORMAT = 2
PARTIAL, OLD = ".partial", ".old"
NAME = re.compile(r"step-\d{8,}")
PARTIAL_NAME = re.compile(r"(step-\d{8,})(\.old)?(\.\d+)?\.partial")
# The first line of a record, always as long; the checksum is that of all behind it. So neither a
# damaged length nor damaged text is believed before it is known to be what was written.
SEAL = '{{"stageline_checkpoint": {}, "bytes": {}, "crc32": {},'
SEAL_BYTES = 80
SEAL_PATTERN = re.compile(
    SEAL.format(r"(\d{1,9})", r"(\d{1,15})", r"(\d{1,10})").replace("{", r"\{", 1) + r" *\n"
)
FIRST_FORMAT = re.compile(r'\{\s*"stageline_checkpoint": 1,')


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint that was saved last, or None if there is none.

    A damaged one is passed over with a warning. If no other is there, that is an error: None would
    be taken for a folder to start anew in.
    """
    found, unreadable = _complete(Path(folder))
    if unreadable:
        path, why = next(iter(unreadable.items()))
        if not found:
            raise CheckpointError(
                f"{why}; {str(path.parent)!r} has no other checkpoint: restore it from elsewhere, "
                "or delete it to start anew"
            )
        taken = next(reversed(found)).name
        warnings.warn(f"{path.name} is passed over, {taken} is taken: {why}", stacklevel=2)
    return next(reversed(found), None)


def find(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at this very path, or the latest in this folder."""
    here = Path(path)
    if os.path.lexists(here / RECORD):
        return here
    found = latest(here)
    if found is None:
        raise CheckpointError(
            f"{str(here)!r} has no checkpoint, but one was to be loaded: give the folder that was "
            "given to sl.save; sl.latest tells whether there is one"
        )
    return found


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the fields of a record that is what was written, down to the last bit."""
    path = checkpoint / RECORD
    try:
        text = _unsealed(path)
        fields = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    assert isinstance(fields, dict)  # its seal begins with a brace
    seal = ("stageline_checkpoint", "bytes", "crc32")
    return {name: value for name, value in fields.items() if name not in seal}


def begin(folder: Path, step: int, held: ExitStack) -> Path:
    """Return a new folder to write to, locked until `held` is closed; what crashes left is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _named(folder, PARTIAL_NAME):
        if (name := _name_before(path)) is not None:
            path.rename(path.with_name(name))
        elif path.is_dir() and not path.is_symlink():
            _clear(path)
    final = folder / f"step-{step:08d}"
    if os.path.lexists(final) and not (final / RECORD).is_file():
        raise FileExistsError(f"{str(final)!r} exists and is no checkpoint: move it elsewhere")
    return claim(folder, final.name, held)


def claim(parent: Path, name: str, held: ExitStack) -> Path:
    """Return a new folder `name.partial`, or `name.1.partial` and so on if that is taken."""
    for number in range(1000):
        path = parent / (f"{name}.{number}{PARTIAL}" if number else f"{name}{PARTIAL}")
        with suppress(FileExistsError):
            path.mkdir()
            if _lock(path, held):
                return path
    raise FileExistsError(f"{name}.1{PARTIAL} to {name}.999{PARTIAL} exist: delete them")


def complete(
    temporary: Path, name: str, record: Callable[[int], dict[str, Any]], keep: int
) -> Path:
    """All of it is written: give it its name, and keep that many. `record` takes its number."""
    folder = temporary.parent
    before, _ = _complete(folder)
    fields = record(max(before.values(), default=0) + 1)
    _write(temporary / RECORD, _sealed(fields))
    _sync(temporary)
    final = folder / name
    old = _aside(final)
    try:
        temporary.rename(final)
    except OSError:
        if old is not None:
            old.rename(final)
        raise
    _sync(folder)
    if old is not None:
        _remove(old)
    others = [path for path in before if path != final and path.suffix != PARTIAL]
    for path in others[: -(keep - 1) or None]:  # all but the last that many; all, if keep is 1
        _delete(path)
    return final


def abandon(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def clear(parent: Path, name: str) -> None:
    """Delete what crashes left of folders that were claimed by this name."""
    for path in _named(parent, re.compile(re.escape(name) + r"(\.\d+)?\.partial")):
        if path.is_dir() and not path.is_symlink():
            _clear(path)


def _complete(folder: Path) -> tuple[dict[Path, int], dict[Path, str]]:
    """Return the numbers of those that can be read, and why the others cannot.

    They are in the order in which they were saved: after a return to an earlier step that is not
    the order of steps.
    """
    numbers, unreadable = {}, {}
    try:
        paths = list(_checkpoints(folder))
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}") from error
    for path in paths:
        try:
            numbers[path] = _number(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # or another process has just deleted it
                unreadable[path] = str(error)
    ordered = sorted(numbers.items(), key=lambda item: (item[1], item[0].name))
    return dict(ordered), unreadable


def _checkpoints(folder: Path) -> Iterator[Path]:
    yield from (path for path in _named(folder, NAME) if path.is_dir())
    yield from (path for path in _named(folder, PARTIAL_NAME) if _name_before(path))


def _name_before(path: Path) -> str | None:
    """Return the name of a checkpoint that lost it when a crash came between two renames."""
    name = path.name.removesuffix(OLD + PARTIAL)
    is_whole = name != path.name and (path / RECORD).is_file()
    return name if is_whole and not os.path.lexists(path.with_name(name)) else None


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ValueError as error:  # a path with a null byte
        raise OSError(str(error)) from error
    return [folder / name for name in names if pattern.fullmatch(name)]


def _number(checkpoint: Path) -> int:
    number = read_record(checkpoint).get("number")
    if isinstance(number, bool) or not isinstance(number, int):
        raise CheckpointError(f"{str(checkpoint)!r} has {number!r} for a number")
    return number


def _sealed(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields, indent=1).removeprefix("{").encode()
    seal = SEAL.format(FORMAT, SEAL_BYTES + len(body), zlib.crc32(body))
    return f"{seal:<{SEAL_BYTES - 1}}\n".encode() + body


def _unsealed(path: Path) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for somebody to write
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        head = file.read(SEAL_BYTES)
        seal = SEAL_PATTERN.fullmatch(head.decode("ascii", "replace"))
        if seal is None and FIRST_FORMAT.match(head.decode("ascii", "replace")):
            _check_format(1)
        if seal is None:
            raise ValueError("it is damaged, or not of sl.save: load another checkpoint")
        version, num_bytes, crc32 = map(int, seal.groups())
        _check_format(version)
        if num_bytes != found.st_size:
            raise ValueError(
                f"it is damaged, {found.st_size} bytes instead of {num_bytes}: load another "
                "checkpoint"
            )
        body = file.read(num_bytes - SEAL_BYTES)
    if zlib.crc32(body) != crc32:
        raise ValueError(
            "it is damaged, its checksum is another than it was written with: load another "
            "checkpoint"
        )
    return head + body


def _check_format(version: int) -> None:
    if version != FORMAT:
        raise ValueError(
            f"it has format {version}, but this version of Stageline reads format {FORMAT}, which "
            "has checksums: load it with the version that saved it"
        )


def _lock(path: Path, held: ExitStack) -> bool:
    """Lock a folder; False if somebody took it for a leftover meanwhile.

    Where folders cannot be locked, such as on NFS, what another process is writing looks like a
    leftover: its save fails, and says so.
    """
    if sys.platform == "win32":
        return True
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    held.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return path.exists() and os.path.samestat(os.fstat(handle), path.stat())


def _is_locked(path: Path) -> bool:
    with ExitStack() as held:
        return not _lock(path, held)


def _clear(path: Path) -> None:
    """Delete what a crash left; if that cannot be done, saves go on beside it."""
    if _is_locked(path):
        return
    try:
        _remove(path)
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} is left of an interrupted save and cannot be deleted: {error}; delete "
            "it by hand",
            stacklevel=2,
        )


def _aside(final: Path) -> Path | None:
    """The same step was saved before: take its name away, and return where it is now."""
    if not os.path.lexists(final):
        return None
    old = final.with_name(f"{final.name}{OLD}{PARTIAL}")
    if os.path.lexists(old):
        _remove(old)
    return final.rename(old)


def _delete(checkpoint: Path) -> None:
    names = (f"{checkpoint.name}.{number}{PARTIAL}" for number in count(1))
    unnamed = next(
        path for name in names if not os.path.lexists(path := checkpoint.with_name(name))
    )
    with suppress(FileNotFoundError):  # another process deleted it
        _remove(checkpoint.rename(unnamed))


def _remove(path: Path) -> None:
    """Delete a folder, its record first: what has none is no checkpoint. Do not follow links."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for _ in range(100):
        with suppress(FileNotFoundError):  # another process is deleting it too
            (path / RECORD).unlink(missing_ok=True)
            shutil.rmtree(path)
        if not path.exists():
            return


def _write(path: Path, text: bytes) -> None:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """New names last through a loss of power; not every system can open a folder for that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
