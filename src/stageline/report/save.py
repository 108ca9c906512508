"""Write a picture of a timeline to a file, in the format of its suffix."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from stageline.errors import ReportError
from stageline.files import checked_path, write_text
from stageline.limits import MOST_DRAWN, check_most
from stageline.report.html import page
from stageline.report.perfetto import trace
from stageline.report.svg.drawing import svg
from stageline.report.timeline import Timeline

WRITERS = {".svg": svg, ".html": page, ".json": trace}


def save(timeline: Timeline, path: str | Path) -> None:
    """Write a picture of a timeline."""
    check_most(
        "the number of actions",
        sum(map(len, timeline.spans)),
        MOST_DRAWN,
        "draw a schedule of fewer micro-batches",
        ReportError,
    )
    writers = {suffix: partial(writer, timeline) for suffix, writer in WRITERS.items()}
    write(path, "a timeline", writers)


def write(
    path: str | os.PathLike[str], what: str, writers: Mapping[str, Callable[[], str]]
) -> None:
    """Write the text of the writer for the path's suffix; raise `ReportError` if there is none."""
    path = checked_path(path, ReportError)
    if path.suffix.lower() not in writers:
        ending = f"ends in {path.suffix}" if path.suffix else "has no suffix"
        *most, last = writers
        raise ReportError(
            f"{path.name!r} {ending}, but {what} is saved as {', '.join(most)} or {last}: "
            "use one of them"
        )
    write_text(path, writers[path.suffix.lower()](), ReportError)
