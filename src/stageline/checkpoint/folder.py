"""The checkpoints in a folder: each is complete or absent.

    run/step-00000100/checkpoint.json, shard-00001.safetensors, …
    run/step-00000200.partial/         being written, being deleted, or left by a crash
    run/step-00000100.old.partial/     being replaced by another save of the same step

A checkpoint is renamed to its final name when all of it is written, and loses that name before any
of it is deleted. Files and folders with other names are neither read nor deleted. A process that
writes a folder holds a lock on it, which ends with the process. This distinguishes what a crash
left behind from what another process is writing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

from stageline.checkpoint.record_file import RECORD, read_record, record_text
from stageline.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

PARTIAL, OLD = ".partial", ".old"
NAME = re.compile(r"step-\d{8,}")
PARTIAL_NAME = re.compile(r"(step-\d{8,})(\.old)?(\.\d+)?\.partial")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint that was saved last, or None if there is none.

    A damaged checkpoint is skipped with a warning. If all are damaged, raise `CheckpointError`:
    None would mean that training starts from scratch.
    """
    found, unreadable = _find_checkpoints(Path(folder))
    if unreadable:
        path, reason = next(iter(unreadable.items()))
        if not found:
            raise CheckpointError(
                f"{reason}; {str(path.parent)!r} has no other checkpoint: restore it from a "
                "backup, or delete it to start from scratch"
            )
        chosen = next(reversed(found)).name
        warnings.warn(f"skipped {path.name}, using {chosen}: {reason}", stacklevel=2)
    return next(reversed(found), None)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a checkpoint, or else the latest checkpoint in this folder."""
    here = Path(path)
    if os.path.lexists(here / RECORD):
        return here
    found = latest(here)
    if found is None and here.is_file():
        raise CheckpointError(
            f"{str(here)!r} is a file, but a checkpoint is a folder: give the one that was given "
            "to sl.save, or read what torch.save wrote with torch.load, and give that to "
            "pipe.load_state_dict"
        )
    if found is None:
        raise CheckpointError(
            f"{str(here)!r} has no checkpoint to load: give the folder that was given to sl.save; "
            "sl.latest returns None if there is no checkpoint yet"
        )
    return found


def create_partial(folder: Path, step: int, held: ExitStack) -> Path:
    """Make a folder to write a checkpoint to, locked until `held` closes; delete leftovers."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _entries(folder, PARTIAL_NAME):
        if (name := _interrupted_name(path)) is not None:
            path.rename(path.with_name(name))
        elif path.is_dir() and not path.is_symlink():
            _delete_leftover(path)
    final = folder / f"step-{step:08d}"
    if os.path.lexists(final) and not (final / RECORD).is_file():
        raise FileExistsError(f"{str(final)!r} exists and is not a checkpoint: move it elsewhere")
    return claim_partial(folder, final.name, held)


def claim_partial(parent: Path, name: str, held: ExitStack) -> Path:
    """Make and lock a folder `name.partial`, or `name.1.partial` and so on if that exists."""
    for number in range(1000):
        path = parent / (f"{name}.{number}{PARTIAL}" if number else f"{name}{PARTIAL}")
        with suppress(FileExistsError):
            path.mkdir()
            if _lock(path, held):
                return path
    raise FileExistsError(f"{name}.1{PARTIAL} to {name}.999{PARTIAL} exist: delete them")


def publish(temporary: Path, name: str, record: Callable[[int], dict[str, Any]], keep: int) -> Path:
    """Write the record, rename the folder to `name`, and delete all but the last `keep`.

    `record` returns the record's fields for the number of this save.
    """
    folder = temporary.parent
    before, _ = _find_checkpoints(folder)
    fields = record(max(before.values(), default=0) + 1)
    _write_file(temporary / RECORD, record_text(fields))
    _sync_folder(temporary)
    final = folder / name
    old = _move_aside(final)
    try:
        temporary.rename(final)
    except OSError:
        if old is not None:
            old.rename(final)
        raise
    _sync_folder(folder)
    if old is not None:
        _delete_tree(old)
    others = [path for path in before if path != final and path.suffix != PARTIAL]
    for path in others[: -(keep - 1) or None]:  # all but the last keep - 1; all, if keep is 1
        _delete_checkpoint(path)
    return final


def discard(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def delete_leftovers(parent: Path, name: str) -> None:
    """Delete folders that `claim_partial` made for this name before a crash."""
    for path in _entries(parent, re.compile(re.escape(name) + r"(\.\d+)?\.partial")):
        if path.is_dir() and not path.is_symlink():
            _delete_leftover(path)


def _find_checkpoints(folder: Path) -> tuple[dict[Path, int], dict[Path, str]]:
    """Return the save numbers of readable checkpoints, and why others cannot be read.

    They are in the order in which they were saved, which differs from the order of their steps
    after training has gone back to an earlier step.
    """
    numbers, unreadable = {}, {}
    try:
        paths = list(_complete_folders(folder))
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}") from error
    for path in paths:
        try:
            numbers[path] = _save_number(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # or another process has just deleted it
                unreadable[path] = str(error)
    ordered = sorted(numbers.items(), key=lambda item: (item[1], item[0].name))
    return dict(ordered), unreadable


def _complete_folders(folder: Path) -> Iterator[Path]:
    yield from (path for path in _entries(folder, NAME) if path.is_dir())
    yield from (path for path in _entries(folder, PARTIAL_NAME) if _interrupted_name(path))


def _interrupted_name(path: Path) -> str | None:
    """Return the name of a checkpoint that lost it in a crash between two renames."""
    name = path.name.removesuffix(OLD + PARTIAL)
    is_complete = name != path.name and (path / RECORD).is_file()
    return name if is_complete and not os.path.lexists(path.with_name(name)) else None


def _entries(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the entries of a folder whose names match, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ValueError as error:  # a path with a null byte
        raise OSError(str(error)) from error
    return [folder / name for name in names if pattern.fullmatch(name)]


def _save_number(checkpoint: Path) -> int:
    number = read_record(checkpoint).get("number")
    if isinstance(number, bool) or not isinstance(number, int):
        raise CheckpointError(f"{str(checkpoint)!r} has {number!r} for its number")
    return number


def _lock(path: Path, held: ExitStack) -> bool:
    """Lock a folder; return False if another process has deleted it as a leftover.

    Where folders cannot be locked, such as on NFS, a folder that another process is writing looks
    like a leftover: its save fails with an error.
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


def _delete_leftover(path: Path) -> None:
    """Delete a folder that a crash left; if that fails, warn and continue.

    It is locked meanwhile: a save that has just made it must not begin to write to it.
    """
    with ExitStack() as held:
        if not _lock(path, held):
            return
        try:
            _delete_tree(path)
        except OSError as error:
            warnings.warn(
                f"{str(path)!r} was left by an interrupted save and cannot be deleted: {error}; "
                "delete it yourself",
                stacklevel=2,
            )


def _move_aside(final: Path) -> Path | None:
    """Rename an earlier checkpoint of the same step, if any, and return its new path."""
    if not os.path.lexists(final):
        return None
    old = final.with_name(f"{final.name}{OLD}{PARTIAL}")
    if os.path.lexists(old):
        _delete_tree(old)
    return final.rename(old)


def _delete_checkpoint(checkpoint: Path) -> None:
    names = (f"{checkpoint.name}.{number}{PARTIAL}" for number in count(1))
    unnamed = next(
        path for name in names if not os.path.lexists(path := checkpoint.with_name(name))
    )
    with suppress(FileNotFoundError):  # another process deleted it
        _delete_tree(checkpoint.rename(unnamed))


def _delete_tree(path: Path) -> None:
    """Delete a folder, its record first: without one it is no checkpoint. Do not follow links."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for _ in range(100):
        with suppress(FileNotFoundError):  # another process is deleting it too
            (path / RECORD).unlink(missing_ok=True)
            shutil.rmtree(path)
        if not path.exists():
            return


def _write_file(path: Path, text: bytes) -> None:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames survive a power loss; not every system can open a folder for that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
