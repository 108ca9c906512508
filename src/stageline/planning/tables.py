"""Tables as text, for `print`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

WIDTH = 110


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str]) -> str:
    """Numbers stand to the right; the columns in `left` are words."""
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        drawn.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        drawn.add_row(*row)
    with StringIO() as text:
        Console(file=text, width=WIDTH, highlight=False, markup=False).print(drawn)
        return text.getvalue().rstrip()
