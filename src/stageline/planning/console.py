"""Tables and progress bars for the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

TABLE_WIDTH = 110  # characters
DELAY = 1.0  # seconds before a progress bar is shown


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str]
) -> str:
    """Return a text table; columns named in `left` are left-aligned, the others right-aligned."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    with StringIO() as text:
        Console(file=text, width=TABLE_WIDTH, highlight=False, markup=False).print(table)
        return text.getvalue().rstrip()


@contextmanager
def progress_bar(total: int, unit: str, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal; call the yielded function before each of `total` parts."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.completed}/{task.total} {task.description}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(unit, total=total)
    enabled = enabled and console.is_terminal
    started = perf_counter()
    parts = itertools.count()

    def begin_part() -> None:
        bar.update(task, completed=next(parts))
        if enabled and perf_counter() - started > DELAY:
            bar.start()

    try:
        yield begin_part
    finally:
        if bar.live.is_started:
            bar.stop()
