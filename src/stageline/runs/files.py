"""Read files of a run folder, which may hold anything: within bounds, and never outside of it.

A file of lines grows while it is read and may be huge. Of a large one, lines at even distances are
read, so the time does not depend on its size. A last line without its end is still being written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from stageline.errors import ReportError
from stageline.limits import MOST_FILE_BYTES
from stageline.units import format_bytes

MOST_READ_WHOLE = 4 * 2**20  # of lines: 10,000 reports, read in 50 ms
LONGEST_LINE = 2**16  # a report on a thousand ranks has 30 kB
USUAL_LINE = 2**9  # an event has 100 bytes
MOST_WITHOUT_END = 16 * 2**20  # bytes read in search of lines: a file without any took 6 s
T = TypeVar("T")


def read_inside(folder: Path, name: str) -> bytes | None:
    """Return the contents of a file in a folder; None if it is not there."""
    file = open_inside(folder, name)
    if file is None:
        return None
    with file:
        found = file.read(MOST_FILE_BYTES + 1)
    if len(found) > MOST_FILE_BYTES:
        raise ReportError(f"{name} has more than {format_bytes(MOST_FILE_BYTES)}")
    return found


def some_lines(folder: Path, name: str, most: int) -> list[bytes]:
    """Return at most `most` lines of a file: the first, the last, and others evenly between."""
    file = open_inside(folder, name)
    if file is None:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        if size <= MOST_READ_WHOLE:
            return evenly(_complete_lines(file.read(MOST_READ_WHOLE)), most)
        found = list(_lines_at(file, [size * part // most for part in range(most)]))
        return found[: most - 1] + _tail(file, size, LONGEST_LINE)[-1:]


def last_lines(folder: Path, name: str, most: int) -> list[bytes]:
    """Return the last lines of a file: one of any length, others of usual length."""
    file = open_inside(folder, name)
    if file is None:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        return _tail(file, size, LONGEST_LINE + most * USUAL_LINE)[-most:]


def open_inside(folder: Path, name: str) -> BinaryIO | None:
    """Open a file in a folder; None if it is not there.

    Raise `ReportError` for a link, which may lead anywhere, and for what is not a regular file:
    opening a named pipe would wait for a writer.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(folder / name, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "is a link" if (folder / name).is_symlink() else f"{error.strerror}"
        raise ReportError(f"{name} was not read: {reason}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ReportError(f"{name} was not read: it is not a regular file")
    return os.fdopen(handle, "rb")


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at even distances, with the first and the last.

    >>> evenly("abcdefg", 3)
    ['a', 'd', 'g']
    """
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


def _complete_lines(contents: bytes) -> list[bytes]:
    return [line for line in contents.split(b"\n")[:-1] if line]


def _lines_at(file: BinaryIO, offsets: Sequence[int]) -> Iterator[bytes]:
    """Yield the line after each offset, and at offset 0 the first line, if lines are short."""
    without_end = 0
    for offset in offsets:
        file.seek(offset)
        before = file.readline(LONGEST_LINE) if offset else b"\n"
        line = file.readline(LONGEST_LINE)
        if line.endswith(b"\n"):
            yield line
        without_end += sum(len(part) for part in (before, line) if not part.endswith(b"\n"))
        if without_end > MOST_WITHOUT_END:
            return


def _tail(file: BinaryIO, size: int, num_bytes: int) -> list[bytes]:
    start = max(0, size - num_bytes)
    file.seek(start)
    lines = file.read(num_bytes)
    if start:
        lines = lines.partition(b"\n")[2]
    return _complete_lines(lines)
