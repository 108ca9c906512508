"""The table of real models: do they train in a pipeline as they do without one, to the bit?

    python -m benchmarks.models.table [--quick] [--only NAME]...

Every model is trained under four schedules, on 2 and 3 ranks, in threads and in processes, with and
without dropout, and compared with the unwrapped model in a plain loop; beside it, torch's own
pipeline(). What was found is kept in results.json, so that a run may be interrupted.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from benchmarks.models.catalogue import catalogue, missing_libraries
from benchmarks.models.combination import BACKENDS, RANKS, SCHEDULES
from benchmarks.models.results import ModelResult, Results
from benchmarks.models.train_all import train_all
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
MAX_REASON = 40  # characters, in a terminal
MARKERS = "<!-- table -->", "<!-- end of table -->"
COLUMNS = ("model", "layers", "equal", "names", "traced", "runs", "other size", "names", "because")
MIN_COMBINATIONS = len(SCHEDULES) * len(RANKS) * len(BACKENDS)  # of a model without dropout


def row(name: str, found: ModelResult) -> tuple[str, ...]:
    ours = (str(found.num_layers), f"{found.num_equal} / {len(found.faults)}")
    names = "yes" if not found.names else f"no: {found.names}"
    if (traced := found.torch) is None:
        return name, *ours, names, *("",) * 5
    reached = [not traced.not_traced]
    reached += [reached[0] and not traced.not_run]
    reached += [reached[1] and not traced.not_at_other_size]
    reason = traced.not_traced or traced.not_run or traced.not_at_other_size
    kept = f"{traced.num_kept} / {traced.num_names}"
    answers = ("yes" if is_reached else "no" for is_reached in reached)
    return name, *ours, names, *answers, kept, reason


def totals(models: dict[str, ModelResult]) -> tuple[str, ...]:
    found, traced = list(models.values()), [r.torch for r in models.values() if r.torch]
    equal, run = sum(r.num_equal for r in found), sum(len(r.faults) for r in found)
    runs = [t for t in traced if not t.not_traced and not t.not_run]
    return (
        f"{len(found)} models",
        str(sum(r.num_layers for r in found)),
        f"{equal} / {run}",
        f"{sum(not r.names for r in found)}",
        f"{sum(not t.not_traced for t in traced)}",
        f"{len(runs)}",
        f"{sum(not t.not_at_other_size for t in runs)}",
        f"{sum(t.num_kept for t in traced)} / {sum(t.num_names for t in traced)}",
        "",
    )


def rich_table(models: dict[str, ModelResult]) -> Table:
    table = Table(header_style="bold", show_footer=True)
    for number, (column, total) in enumerate(zip(COLUMNS, totals(models), strict=True)):
        title = column if number < 4 else f"torch: {column}"
        is_text = number in (0, len(COLUMNS) - 1)
        table.add_column(title, total, justify="left" if is_text else "right", min_width=6)
    for name, found in models.items():
        *cells, reason = row(name, found)
        table.add_row(*cells, reason[:MAX_REASON])
    return table


def markdown_table(models: dict[str, ModelResult]) -> str:
    titles = [*COLUMNS[:4], *(f"torch: {column}" for column in COLUMNS[4:])]
    body = [row(name, found) for name, found in models.items()]
    bold = [f"**{cell}**" if cell else "" for cell in totals(models)]
    lines = [titles, ["---"] * len(titles), *body, bold]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def write_readme(results: Results, models: dict[str, ModelResult]) -> None:
    """Put the table and its environment between the markers."""
    path = FOLDER / "README.md"
    before, rest = path.read_text(encoding="utf-8").split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    facts = ", ".join(f"{key} {value}" for key, value in results.environment.items())
    minutes = sum(found.seconds for found in models.values()) / 60
    text = (
        f"{markdown_table(models)}\n\n### Environment\n"
        f"{facts}; one intra-op thread; {minutes:.0f} minutes of training on a shared machine, of "
        "which threads and processes run side by side.\n"
    )
    path.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{after}", encoding="utf-8")


def main(
    only: Annotated[list[str] | None, typer.Option(help="Name of a model; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One schedule for each model.")] = False,
    results_file: Annotated[
        Path, typer.Option(help="Where results are kept, to go on from.")
    ] = FOLDER / "results.json",
) -> None:
    """Train real models in a pipeline and in a plain loop, and print the table."""
    console = Console()
    known = list(catalogue())
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"no model {min(unknown)!r}: there are {', '.join(known)}")
    for library in missing_libraries():
        console.print(f"{library} is not installed, so its models are left out", style="yellow")
    names = [name for name in known if not only or name in only]
    results, start = Results(results_file), perf_counter()
    train_all(names, results, console, quick=quick)
    models = {name: results.of(name) for name in names}
    console.print(rich_table(models))
    equal, run = (sum(each) for each in zip(*map(counts, models.values()), strict=True))
    took = perf_counter() - start
    console.print(f"{equal} of {run} combinations equal to the bit, in {took:.0f} s")
    is_complete = all(len(r.faults) >= MIN_COMBINATIONS for r in models.values())
    if is_complete and not only and not missing_libraries():
        write_readme(results, models)
    if equal < run or any(found.names for found in models.values()):
        raise typer.Exit(1)


def counts(found: ModelResult) -> tuple[int, int]:
    return found.num_equal, len(found.faults)


if __name__ == "__main__":
    typer.run(main)
