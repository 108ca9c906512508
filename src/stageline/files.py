"""Read and write the user's files, which may hold anything.

    path ─► is it a file? ─► is it small enough? ─► is it text? ─► is it JSON, not too deep?

If an answer is no, the error is one of Stageline's own and names the file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from stageline.arguments import shown
from stageline.errors import StagelineError
from stageline.limits import MOST_FILE_BYTES
from stageline.units import format_bytes

OPEN_PIPES = ("/dev/fd/", "/proc/self/fd/")  # paths that a shell gives for <(command)
LONGEST_PATH = 500  # the most characters of a path that an error shows
AnyPath = str | os.PathLike[str]


def read_bytes(path: AnyPath, error: type[StagelineError], most: int = MOST_FILE_BYTES) -> bytes:
    """Return the contents of a file; raise `error` if it cannot be read or is too large."""
    place = checked_path(path, error)
    try:
        kind = place.stat().st_mode
        is_pipe = stat.S_ISFIFO(kind) and str(place).startswith(OPEN_PIPES)
        if not stat.S_ISREG(kind) and not is_pipe:
            seen = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
            raise error(f"{_name(place)} is {seen}, but has to be a file")
        with place.open("rb") as file:
            found = file.read(most + 1)
    except OSError as problem:
        raise error(f"{_name(place)} cannot be read: {problem.strerror}") from problem
    if len(found) > most:
        raise error(
            f"{_name(place)} has more than {format_bytes(most)}, which is the limit for such "
            "files: is it the right one?"
        )
    return found


def read_text(path: AnyPath, error: type[StagelineError], most: int = MOST_FILE_BYTES) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    found = read_bytes(path, error, most)
    try:
        text = found.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"byte {problem.start} of {_name(path)} is not text, but it has to be text in "
            "UTF-8: was it saved in another encoding?"
        ) from None
    if "\0" in text:
        raise error(
            f"{_name(path)} has a NUL at character {text.index(chr(0))}, but has to be text "
            "in UTF-8: was it saved as UTF-16, or cut off by a crash?"
        )
    return text


def read_json(path: AnyPath, error: type[StagelineError], most: int = MOST_FILE_BYTES) -> Any:
    """Return the value in a JSON file."""
    import json  # noqa: PLC0415  not needed for schedules and timelines

    text = read_text(path, error, most)
    try:
        return json.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as problem:  # not JSON, or a number of more than 4,300 digits
        reason = str(problem)
    raise error(f"{_name(path)} is not JSON: {reason}")


def write_bytes(path: AnyPath, data: bytes, error: type[StagelineError]) -> None:
    """Write a file; raise `error` if it cannot be written."""
    place = checked_path(path, error)
    try:
        place.write_bytes(data)
    except OSError as problem:
        raise error(f"{_name(place)} cannot be written: {problem.strerror}") from problem


def write_text(path: AnyPath, text: str, error: type[StagelineError]) -> None:
    """Write a UTF-8 file; raise `error` if it cannot be written."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), error)


def _name(path: AnyPath) -> str:
    text = os.fspath(path)
    return repr(text) if len(text) <= LONGEST_PATH else shown(text)


def checked_path(path: object, error: type[StagelineError]) -> Path:
    """Return a value as a path; raise `error` if it cannot be one."""
    if not isinstance(path, str | os.PathLike):
        raise error(f"the path is {shown(path)}, but has to be text or a Path")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise error(f"the path is {shown(text)}, but has to name a file")
    return Path(text)
