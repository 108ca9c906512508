"""Draw bars that are divided into parts, a row for each rank: where its time goes."""

from __future__ import annotations

from collections.abc import Sequence

from stageline.report.summary import number, percent
from stageline.report.svg.drawing import xml
from stageline.report.svg.lane_elements import px
from stageline.runs.breakdown import PARTS, RankTime
from stageline.runs.files import evenly
from stageline.runs.pages.elements import details, legend, table
from stageline.runs.pages.style import part_class

FULL = 1000.0  # width of a bar of the greatest value, in units of the drawing
MANY_ROWS = 16  # from here on rows are lower
MOST_ROWS = 256  # that are shown of a thousand ranks


def time_bars(rows: Sequence[tuple[str, RankTime]]) -> str:
    """Return bars of named rows, with a legend, and a table of their numbers."""
    most = max((time.total for _, time in rows), default=0.0)
    if not most:
        return ""
    used = [part for part in PARTS if any(part in time.parts for _, time in rows)]
    bars = [(name, _segments(time, used, most), f"{number(time.total)} ms") for name, time in rows]
    numbers = (
        (name, *(_share(time, part) for part in used), number(time.total))
        for name, time in evenly(rows, MOST_ROWS)
    )
    return "\n".join(
        [
            legend((part_class(part), part) for part in used),
            bar_table(bars),
            details("as numbers", table(("", *used, "ms"), numbers, "numbers")),
        ]
    )


def bar(value: float, most: float, css: str, words: str) -> str:
    """Return one undivided bar."""
    return _rectangle(0.0, FULL * value / most if most else 0.0, css, words)


def bar_table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return rows of a name, a bar as SVG elements, and a number; some of them if they are many."""
    css = "bars dense" if len(rows) > MANY_ROWS else "bars"
    body = "\n".join(
        f'<tr><td>{xml(name)}</td><td><svg viewBox="0 0 {px(FULL)} 1" '
        f'preserveAspectRatio="none" role="img" aria-label="{xml(name)}">{elements}</svg></td>'
        f"<td>{xml(words)}</td></tr>"
        for name, elements, words in evenly(rows, MOST_ROWS)
    )
    return f'<table class="{css}"><tbody>\n{body}\n</tbody></table>'


def _segments(time: RankTime, used: Sequence[str], most: float) -> str:
    x, found = 0.0, []
    for part in used:
        width = FULL * time.parts.get(part, 0.0) / most
        words = f"{part}: {number(time.parts.get(part, 0.0))} ms, {_share(time, part)}"
        found.append(_rectangle(x, width, part_class(part), words))
        x += width
    return "".join(found)


def _rectangle(x: float, width: float, css: str, words: str) -> str:
    return (
        f'<rect class="{css}" x="{px(x)}" width="{px(width)}" height="1">'
        f"<title>{xml(words)}</title></rect>"
    )


def _share(time: RankTime, part: str) -> str:
    return percent(time.parts.get(part, 0.0) / time.total) if time.total else "–"
