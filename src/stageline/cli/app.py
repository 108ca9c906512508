"""The `stageline` command line: its list of commands, and how errors and signals end it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer
from typer.core import TyperGroup

from stageline import __version__
from stageline.cli.demo.command import demo
from stageline.cli.deprecated import Command, current_command
from stageline.cli.draw import draw
from stageline.cli.links import links
from stageline.cli.models.profile import profile
from stageline.cli.models.show import show
from stageline.cli.models.verify import verify
from stageline.cli.options import FAMILY_LIST
from stageline.cli.plan import plan
from stageline.cli.report import report
from stageline.cli.run import run
from stageline.cli.simulate import simulate
from stageline.cli.studio import studio
from stageline.errors import StagelineError

BAD_INPUT = 2  # the exit code of a command that cannot do what it was asked for
INTERRUPTED = 130  # the exit code after Ctrl-C: 128 + SIGINT
SCRIPT_ARGUMENTS = {  # what follows the script is for the script
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


class Commands(TyperGroup):
    """All commands. Ctrl-C ends each of them with one line and the exit code that shells expect."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, current_command(args))


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Pipeline-parallel training: check, simulate and draw every schedule before you run it.",
)
app.command(cls=Command)(demo)
app.command(cls=Command, epilog=FAMILY_LIST)(draw)
app.command(cls=Command, epilog=FAMILY_LIST)(simulate)
app.command(cls=Command)(show)
app.command(cls=Command)(profile)
app.command(cls=Command)(links)
app.command(cls=Command)(plan)
app.command(cls=Command, epilog=FAMILY_LIST)(verify)
app.command(cls=Command, context_settings=SCRIPT_ARGUMENTS)(run)
app.command(cls=Command)(report)
app.command(cls=Command)(studio)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version)
    ] = False,
) -> None:
    """Take the options of `stageline` itself."""


def main() -> None:
    """Run the command line; print errors as one line, without a traceback."""
    if sys.stdout is None:  # the parent process closed it
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  open as long as the process
    before, sys.stdout = sys.stdout, cast("TextIO", InterruptibleOutput(sys.stdout))
    try:
        app()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    except StagelineError as error:
        _fail(str(error))
    except MemoryError:
        _fail("there is not enough memory for this: use smaller sizes")
    finally:
        sys.stdout = before


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(BAD_INPUT) from None


class InterruptibleOutput(io.TextIOBase):
    """Standard output whose reader may close it early, as in `stageline demo | head`.

    The command continues without it: it still writes the files it was asked for, and its exit code
    reports success or failure. State: whether there is still a reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_read = stream, True

    def write(self, text: str) -> int:
        self._while_read(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._while_read(self.stream.flush)

    def _while_read(self, work: Callable[[], object]) -> None:
        try:
            if self.is_read:
                work()
        except BrokenPipeError:
            self.is_read = False
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.stream.fileno())  # for what is still buffered
            os.close(devnull)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # as above
        return self.stream.errors
