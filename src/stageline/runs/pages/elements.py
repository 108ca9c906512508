"""Parts of an HTML page. Text from files is escaped here, by `Text`, tables and pages.

What a page may load is nothing: its policy allows styles of its own, and no scripts or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stageline.report.svg.drawing import xml
from stageline.runs.pages.style import STYLE

GENERATOR = '<meta name="generator" content="stageline report">'
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def document(title: str, body: Iterable[str]) -> str:
    """Return a page; the title is escaped, the parts of the body are HTML."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            GENERATOR,
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{xml(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    """Return a part of a page with a heading; nothing if it has no content."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{xml(title)}</h2>\n{content}\n</section>" if content else ""


def paragraph(text: str, css: str = "") -> str:
    return f"<p{_class(css)}>{xml(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """Return a table of text; the first column is aligned to the left, the others to the right."""
    cells = "".join(f'<th scope="col">{xml(name)}</th>' for name in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{xml(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head_row = f"<thead><tr>{cells}</tr></thead>\n" if any(head) else ""
    inner = f"{head_row}<tbody>\n{body}\n</tbody>\n"
    return f'<div class="wide"><table{_class(css)}>\n{inner}</table></div>'


def pairs(values: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, without those that are empty."""
    shown = [(name, value) for name, value in values if value]
    return table(("", ""), shown, "pairs") if shown else ""


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return a row of large numbers with their names."""
    items = "".join(
        f"<div><dt>{xml(name)}</dt><dd>{xml(value)}</dd></div>" for name, value in values if value
    )
    return f'<dl class="tiles">{items}</dl>'


def details(summary: str, content: str) -> str:
    """Return content that is shown when its summary is clicked."""
    return f"<details><summary>{xml(summary)}</summary>\n{content}\n</details>"


def items(texts: Iterable[str], css: str = "") -> str:
    """Return a list of text."""
    shown = "\n".join(f"<li>{xml(text)}</li>" for text in texts)
    return f"<ul{_class(css)}>\n{shown}\n</ul>" if shown else ""


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return swatches, which have the CSS class of the first of each pair, with their names."""
    shown = "".join(f'<li><i class="{css}"></i>{xml(name)}</li>' for css, name in entries)
    return f'<ul class="legend">{shown}</ul>'


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""
