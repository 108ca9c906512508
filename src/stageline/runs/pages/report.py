"""Read runs, and write the reports about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stageline.runs.findings.findings import findings
from stageline.runs.pages.comparison import comparison_page
from stageline.runs.pages.figures import status
from stageline.runs.pages.markdown import markdown
from stageline.runs.pages.page import run_page
from stageline.runs.pages.write import check_replaceable, write_report
from stageline.runs.read import read_run
from stageline.runs.run import Run

PAGE, SEVERAL = "report.html", "runs.html"  # by default, in the run's folder and in the current one


@dataclass(frozen=True)
class Reported:
    """What was found in runs, in lines of text, and the files that were written."""

    lines: tuple[str, ...]
    notes: tuple[str, ...]  # what could not be read
    files: tuple[Path, ...]


def report(
    folders: Sequence[Path], page_path: Path | None = None, markdown_path: Path | None = None
) -> Reported:
    """Write a page about a run or several, and Markdown if it has a path."""
    runs = [read_run(folder) for folder in folders]
    default = runs[0].folder / PAGE if len(runs) == 1 else Path(SEVERAL)
    files = [check_replaceable(page_path or default)]
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    texts = [page]
    if markdown_path is not None:
        files.append(check_replaceable(markdown_path))
        texts.append(markdown(runs))
    for path, text in zip(files, texts, strict=True):
        write_report(path, text)
    lines = (line for run in runs for line in _lines(run))
    notes = (f"{run.name}: {note}" for run in runs for note in run.notes)
    return Reported(tuple(lines), tuple(notes), tuple(files))


def _lines(run: Run) -> Iterator[str]:
    yield f"{run.name}: {status(run)}, step {run.step}"
    yield from map(str, findings(run))
    yield from (f"{each.kind} at step {each.step}: {each.message}" for each in run.errors)
