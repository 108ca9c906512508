"""Write a report to a file, and replace nothing but a report that was made earlier.

A run's folder may come from elsewhere: a link in it, under the name of the report, is not followed.
"""

from __future__ import annotations

import os
from pathlib import Path

from stageline.errors import ReportError
from stageline.files import checked_path
from stageline.runs.files import open_inside
from stageline.runs.pages.elements import GENERATOR
from stageline.runs.pages.markdown import MARK
from stageline.runs.records import replace_file

MOST_READ = 2000  # bytes of an earlier report: it says at its beginning that it is one


def check_replaceable(path: str | os.PathLike[str]) -> Path:
    """Return the path; raise `ReportError` if something is there that is not a report."""
    place = checked_path(path, ReportError)
    if not place.parent.is_dir():
        raise ReportError(f"{place} cannot be written: use a file in a folder that exists")
    if os.path.lexists(place) and not _is_report(place):
        raise ReportError(f"{place} exists and is not a report: give another file")
    return place


def write_report(path: Path, text: str) -> None:
    """Write a report; readers see the earlier one or the new one."""
    try:
        replace_file(path, text.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from None


def _is_report(path: Path) -> bool:
    """Return whether a file says at its beginning that it is a report, or is empty."""
    try:
        file = open_inside(path.parent, path.name)
    except ReportError:
        return False  # a link or a folder, say
    if file is None:
        return True  # it was deleted just now
    with file:
        beginning = file.read(MOST_READ).decode(errors="replace")
    return not beginning or GENERATOR in beginning or beginning.startswith(MARK)
