"""`stageline report`: a page about a run of `sl.fit`, or about several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.cli.output import print_written
from stageline.runs.findings.findings import findings
from stageline.runs.pages.comparison import comparison_page
from stageline.runs.pages.figures import status
from stageline.runs.pages.markdown import markdown
from stageline.runs.pages.page import run_page
from stageline.runs.pages.write import check_replaceable, write_report
from stageline.runs.read import read_run
from stageline.runs.run import Run

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
    found = [read_run(folder) for folder in runs]
    default = found[0].folder / "report.html" if len(found) == 1 else Path("runs.html")
    page_path = check_replaceable(output or default)
    markdown_path = check_replaceable(markdown_file) if markdown_file else None
    page = run_page(found[0]) if len(found) == 1 else comparison_page(found)
    write_report(page_path, page)
    if markdown_path is not None:
        write_report(markdown_path, markdown(found))
    for run in found:
        _print(run)
    for path in filter(None, (page_path, markdown_path)):
        print_written(path)


def _print(run: Run) -> None:
    typer.echo(f"{run.name}: {status(run)}, step {run.step}")
    for finding in findings(run):
        typer.echo(f"  {finding}")
    for error in run.errors:
        typer.echo(f"  {error.kind} at step {error.step}: {error.message}")
    for note in run.notes:
        typer.echo(f"  note: {note}", err=True)
