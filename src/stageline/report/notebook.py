"""Show values in notebooks, as pictures and tables of bounded size, on light and dark pages."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import islice

from stageline.limits import MOST_SHOWN
from stageline.report.idle import idle_table
from stageline.report.summary import heading
from stageline.report.svg.coarse import MOST_LANES, coarse_svg
from stageline.report.svg.drawing import svg, xml
from stageline.report.timeline import Timeline

MOST_EXACT = 1000  # actions; a picture has 200 bytes for each
MOST_ROWS = 50  # of a table
LONGEST_LINE = 400
CELL = "padding:.2em .6em;border-bottom:1px solid rgba(127,127,127,.4)"  # on light and dark


def timeline_html(timeline: Timeline) -> str:
    """Return a picture of a timeline, and a table of idle times if they were measured."""
    count = sum(map(len, timeline.spans))
    if count > MOST_SHOWN:
        return text_html(f"{timeline!r}: {count:,} actions are too many to draw here")
    picture = svg(timeline) if count <= MOST_EXACT else coarse_svg(timeline)
    html = picture_html(picture, heading(timeline))
    if timeline.idle:
        html += text_html("\n".join(idle_table(timeline.idle[:MOST_LANES], timeline.makespan)))
    return html


def picture_html(picture: str, description: str) -> str:
    """Return an SVG as an image, so that its styles and the page's do not affect each other."""
    data = b64encode(picture.encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img alt="{xml(description)}" style="max-width:100%;background:#fff" src="{source}">'


def text_html(text: str) -> str:
    """Return text as it is, in the colours of the page; nothing if there is none."""
    if not text:
        return ""
    return f'<pre style="color:inherit;background:none;white-space:pre-wrap">{_lines(text)}</pre>'


def table_html(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str], of: str
) -> str:
    """Return a table; rows beyond `MOST_ROWS` are counted, as so many further ones `of` a kind."""
    rows = iter(rows)
    shown = [_row("td", row, columns, left) for row in islice(rows, MOST_ROWS)]
    if more := sum(1 for _ in rows):
        shown.append(f'<tr><td colspan="{len(columns)}">… and {more:,} more {xml(of)}</td></tr>')
    head = _row("th", columns, columns, left)
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
    return f'<table style="{style}"><thead>{head}</thead><tbody>{"".join(shown)}</tbody></table>'


def shortened(line: str) -> str:
    """Return the beginning of a line, if it is long."""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …"


def _row(tag: str, cells: Sequence[str], columns: Sequence[str], left: Sequence[str]) -> str:
    sides = ("left" if name in left else "right" for name in columns)
    return (
        "<tr>"
        + "".join(
            f'<{tag} style="text-align:{side};{CELL}">{xml(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        + "</tr>"
    )


def _lines(text: str) -> str:
    return "\n".join(map(xml, text.splitlines()))
