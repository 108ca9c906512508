"""Checkpoints in a folder: each is complete, or not there.

    run/step-00000100/checkpoint.json, shard-….safetensors, …
    run/step-00000200.partial/         being written, being deleted, or left by a crash

A checkpoint gets its name when all of it is written, and loses it before any of it is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageline.errors import CheckpointError

RECORD = "checkpoint.json"
PARTIAL = ".partial"


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that was saved last, or None if there is none."""
    found = _complete(Path(folder))
    return found[-1] if found else None


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint at this very path, or the latest in this folder."""
    here = Path(path)
    if (here / RECORD).is_file():
        return here
    found = latest(here)
    if found is None:
        raise CheckpointError(
            f"{str(here)!r} has no checkpoint, but one was to be loaded: give the folder that was "
            "given to sl.save; sl.latest tells whether there is one"
        )
    return found


def read_record(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / RECORD
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(fields, dict) or "stageline_checkpoint" not in fields:
        raise CheckpointError(f"{str(path)!r} is not of sl.save: give one of its checkpoints")
    return fields


def begin(folder: Path, step: int) -> Path:
    """Where to write; what crashed saves left is gone."""
    for leftover in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(leftover)
    temporary = folder / f"step-{step:08d}{PARTIAL}"
    temporary.mkdir(parents=True)
    return temporary


def complete(temporary: Path, record: Callable[[int], str], keep: int) -> Path:
    """All of it is written: give it its name, and keep that many. `record` takes its number."""
    folder = temporary.parent
    before = _complete(folder)
    _write(temporary / RECORD, record(_number(before[-1]) + 1 if before else 1))
    final = temporary.with_name(temporary.name.removesuffix(PARTIAL))
    if final.exists():  # the same step again
        _delete(final, ".old")
    temporary.rename(final)
    _sync(folder)
    others = [path for path in before if path != final]
    for old in others[: -(keep - 1) or None]:  # all but the last that many; all, if keep is 1
        _delete(old)
    return final


def abandon(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    """In the order in which they were saved: after a return to an earlier step, not that of steps.

    What cannot be read is no checkpoint.
    """
    numbers = {}
    for path in folder.glob("step-*"):
        if path.suffix != PARTIAL and (path / RECORD).is_file():
            try:
                numbers[path] = _number(path)
            except CheckpointError:
                continue
    return sorted(numbers, key=numbers.__getitem__)


def _number(checkpoint: Path) -> int:
    number = read_record(checkpoint).get("number")
    if not isinstance(number, int):
        raise CheckpointError(f"{str(checkpoint)!r} has {number!r} for a number")
    return number


def _delete(checkpoint: Path, mark: str = "") -> None:
    unnamed = checkpoint.with_name(f"{checkpoint.name}{mark}{PARTIAL}")
    checkpoint.rename(unnamed)
    shutil.rmtree(unnamed)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """New names last through a loss of power; not every system can open a folder for that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)
