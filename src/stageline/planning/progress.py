"""A bar for what takes more than a second, in a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 1.0  # seconds without a bar


@contextmanager
def progress_of(total: int, what: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """To be called before each of `total` parts."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.completed}/{task.total} {task.description}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=total)
    shown = shown and console.is_terminal
    started = perf_counter()
    numbers = itertools.count()

    def begin() -> None:
        bar.update(task, completed=next(numbers))
        if shown and perf_counter() - started > PATIENCE:
            bar.start()

    try:
        yield begin
    finally:
        if bar.live.is_started:
            bar.stop()
