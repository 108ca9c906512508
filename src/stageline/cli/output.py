"""What commands print, the files they save, and the status line while torch is imported."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

from stageline.errors import ReportError
from stageline.files import checked_path
from stageline.report.save import WRITERS
from stageline.report.timeline import Timeline
from stageline.schedules.schedule import Schedule

PIPE_WIDTH = 120  # columns, if standard output is not a terminal


@contextmanager
def loading_torch(console: Console | None = None) -> Iterator[None]:
    """Show a status line while the block imports torch, which takes a second or more.

    Some imports catch the `KeyboardInterrupt` of a Ctrl-C; it is raised again after the block.
    """
    interrupts = []

    def interrupt(number: int, _: object) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    is_default = before is signal.default_int_handler  # SIGINT is not ignored
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        with (console or Console(stderr=True)).status("loading PyTorch"):
            yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def print_rich(*parts: Any) -> None:
    """Print text with markup, or tables, each on lines of its own."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for part in parts:
        console.print(part, highlight=False)


def print_grid(timeline: Timeline) -> None:
    """Print a timeline: in colour and fitted to the screen if it is a terminal, else as text."""
    if sys.stdout.isatty():
        from stageline.report.text.terminal import coloured  # noqa: PLC0415  not needed in a pipe

        console = Console()
        print_rich(coloured(timeline, console.width, max(8, console.height - 1)))
    else:
        typer.echo(str(timeline))


def print_and_save(result: Any, path: Path) -> None:
    """Save a profile or a cluster to a file, and print it."""
    result.save(path)
    typer.echo(str(result))
    print_written(path)


def print_written(path: Path) -> None:
    """Print to standard error that a file was written."""
    typer.echo(f"wrote {path}", err=True)


def check_pictures(paths: Sequence[Path]) -> None:
    """Raise `ReportError` if a file cannot be saved: before a search that may take long."""
    for path in paths:
        if path.suffix.lower() not in (".csv", *WRITERS):
            raise ReportError(f"{path} cannot be saved: use .svg, .html, .json or .csv")
        check_file(path)


def check_file(path: Path) -> None:
    """Raise `ReportError` if a path is a folder, or in a folder that does not exist."""
    checked_path(path, ReportError)
    if path.is_dir() or not path.parent.is_dir():
        raise ReportError(f"{path} cannot be saved: use a file in a folder that exists")


@contextmanager
def saving(paths: Sequence[Path], schedule: Schedule, timeline: Timeline) -> Iterator[None]:
    """Write the files, then run the block, which prints: also if a file cannot be written.

    Files come first because a reader such as `head` may close standard output early.
    """
    written = []
    try:
        for path in paths:
            if path.suffix.lower() == ".csv":
                schedule.to_csv(path)
            else:
                timeline.save(path)
            written.append(path)
    finally:
        yield
        for path in written:
            print_written(path)
