"""A progress bar in a terminal, and a line for each tenth of the steps anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

ShowProgress = Callable[[int, str], None]  # takes the number of steps done and a text


@contextmanager
def progress(console: Console, steps: int, done: int = 0) -> Iterator[ShowProgress]:
    """Yield a function that shows the progress of a run of `steps` steps."""
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    is_live = console.is_terminal and not console.quiet
    with Progress(*columns, console=console, disable=not is_live, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=done)
        last = done

        def show(step: int, text: str) -> None:
            nonlocal last
            bar.update(task, completed=step, description=text)
            if step * 10 // steps > last * 10 // steps:
                console.print(f"step {step:>{len(str(steps))}}   {text}")
            last = step

        yield show
