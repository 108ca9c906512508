"""A picture of a timeline in a file: its suffix says which."""

from __future__ import annotations

from pathlib import Path

from stageline.errors import ReportError
from stageline.report.html import page
from stageline.report.perfetto import trace
from stageline.report.svg import svg
from stageline.report.timeline import Timeline

WRITERS = {".svg": svg, ".html": page, ".json": trace}


def save(timeline: Timeline, path: str | Path) -> None:
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        ending = f"ends in {path.suffix}" if path.suffix else "has no suffix"
        raise ReportError(
            f"{path.name!r} {ending}, but a timeline is saved as .svg, .html or .json: "
            "use one of them"
        )
    path.write_text(WRITERS[path.suffix.lower()](timeline), encoding="utf-8")
