"""`stageline report`: a page about a run of `sl.fit`, or about several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.cli.output import print_written

Runs = Annotated[list[Path], typer.Argument(help="Folders that were given to sl.fit.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="HTML file; by default report.html in the run's folder, or runs.html for several.",
    ),
]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", help="Markdown file, for a pull request.")
]


def report(runs: Runs, output: Output = None, markdown_file: MarkdownFile = None) -> None:
    """Write a page about a run: what would make it faster, and where its time goes.

    [dim]stageline report fitted[/dim]

    [dim]stageline report before after --output comparison.html --markdown comparison.md[/dim]

    The page is one file without scripts. It shows curves, where each rank's time
    goes, the recorded step over the planned one, memory, checkpoints, warnings,
    configuration and environment; of several runs, curves over each other and the
    differences. A run that is still training can be reported on at any time. A file
    that is not a report is not replaced.
    """
    from stageline.runs.pages.report import report as write  # noqa: PLC0415  pydantic takes 0.2 s

    written = write(runs, output, markdown_file)
    for line in written.lines:
        typer.echo(line)
    for note in written.notes:
        typer.echo(f"note: {note}", err=True)
    for path in written.files:
        print_written(path)
