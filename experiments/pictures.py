"""Write figures as SVG files that are the same for the same results."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Text stays text, so that it can be searched; ids and dates would differ from run to run.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "stageline", "font.size": 9}
STYLE |= {"axes.grid": True, "grid.alpha": 0.3}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
PAPER = "#9aa0a6"  # what a paper reports is grey
COLOURS = ("#3366cc", "#dc7633", "#2e8b57", "#a569bd", "#c0392b", "#17a2b8")


def style() -> AbstractContextManager[None]:
    """Enclose the drawing of figures: axes and text take their style when they are made."""
    return mpl.rc_context(STYLE)


def figure(width: float = 8.0, height: float = 4.0) -> Figure:
    """Return an empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Figure, path: Path) -> None:
    """Write the figure as SVG."""
    with style():
        picture.savefig(path, format="svg", metadata={"Date": None})
