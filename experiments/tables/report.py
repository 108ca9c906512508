"""Tables of the results, for the terminal and README.md, and the pictures beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from experiments.results import Results
from experiments.tables import drawings, paper, schedules
from experiments.tables.outcome import (
    Measured,
    Runs,
    breakdown,
    limit,
    mean_forward,
    measured_throughput,
    milliseconds_per_action,
    of_steps,
    predicted_breakdown,
    predicted_throughput,
    seconds,
    speed_up,
)
from experiments.tables.predict import Cell
from experiments.tables.workloads import AMOEBANET, BY_NAME, WORKLOADS, Workload

Row = tuple[str, ...]
MISSING = "–"
PARTS = ("compute", "recompute", "bubble", "imbalance", "transfer", "set-up", "update")


class TextTable(NamedTuple):
    """A table for a terminal or a README, where its key marks its place."""

    key: str
    title: str
    columns: Row
    rows: Sequence[Row]


def write_report(results: Results, folder: Path, console: Console) -> None:
    """Print all tables, and write them and the pictures into the folder."""
    runs = results.read()
    tables = [make(runs) for make in TABLES]
    for table in tables:
        console.print(rich_table(table))
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8")
    for table in tables:
        text = replace_between(text, table.key, markdown(table))
    readme.write_text(text, encoding="utf-8")
    drawings.draw_all(runs, folder)


def replace_between(text: str, key: str, content: str) -> str:
    """Return the text with the content between the key's markers.

    >>> replace_between("<!-- a -->old<!-- end of a -->!", "a", "new")
    '<!-- a -->\\nnew\\n<!-- end of a -->!'
    """
    opening, closing = f"<!-- {key} -->", f"<!-- end of {key} -->"
    before, rest = text.split(opening)
    return f"{before}{opening}\n{content}\n{closing}{rest.split(closing)[1]}"


def rich_table(table: TextTable) -> Table:
    made = Table(title=table.title, title_justify="left", header_style="bold")
    for number, column in enumerate(table.columns):
        made.add_column(column, justify="right" if number else "left")
    for row in table.rows:
        made.add_row(*row)
    return made


def markdown(table: TextTable) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table2(runs: Runs) -> TextTable:
    columns = ("model", "M", "paper", "limit", "predicted", "without overlap", "measured")
    workloads = [each for each in WORKLOADS if not each.has_slow_links]
    rows = [
        (workload.name, str(count), *_throughput_cells(runs, workload, count))
        for workload in workloads
        for count in workload.microbatches
    ]
    return TextTable("table2", "Table 2: throughput, K = 2 / 4 / 8", columns, rows)


def table3(runs: Runs) -> TextTable:
    columns = ("model", "paper", "limit", "predicted", "without overlap", "measured")
    workloads = [each for each in WORKLOADS if each.has_slow_links]
    rows = [(workload.name, *_throughput_cells(runs, workload, 32)) for workload in workloads]
    return TextTable("table3", "Table 3: slow links, M = 32, K = 2 / 4 / 8", columns, rows)


def _throughput_cells(runs: Runs, workload: Workload, count: int) -> Iterator[str]:
    published = paper.throughput(workload.name)
    row = [Cell(workload, ranks, count) for ranks in paper.RANKS]
    lowest = limit(2, min(workload.microbatches))
    yield joined(published.get((cell.num_ranks, count)) for cell in row)
    yield joined(limit(cell.num_ranks, count) / lowest for cell in row)
    yield joined(predicted_throughput(runs, cell) for cell in row)
    yield joined(predicted_throughput(runs, cell, "step_without_overlap") for cell in row)
    yield joined(measured_throughput(runs, cell) for cell in row)


def joined(values: Iterator[float | Measured | None]) -> str:
    """Return figures with slashes between them.

    >>> joined(iter([1.0, None, Measured(2, 0.1)]))
    '1.00 / – / 2.00 ±0.10'
    """
    return " / ".join(figure(value) for value in values)


def figure(value: float | Measured | None) -> str:
    if value is None:
        return MISSING
    return str(value) if isinstance(value, Measured) else f"{value:.2f}"


def cuts(runs: Runs) -> TextTable:
    columns = ("M", "paper", "torchgpipe", "cut by time", "cut by parameters", "largest batch")
    published, rows = paper.throughput(AMOEBANET.name), []
    for count in AMOEBANET.microbatches:
        of_time, of_size = ([Cell(AMOEBANET, ranks, count, cut) for ranks in paper.RANKS]
                            for cut in ("time", "parameters"))  # fmt: skip
        first = paper.TORCHGPIPE[1][0]
        batches = [runs.get(f"predict {cell.name}", {}).get("largest_batch") for cell in of_time]
        cells = (
            joined(published[ranks, count] for ranks in paper.RANKS),
            joined(rate / first for rate in paper.TORCHGPIPE[count]),
            joined(predicted_throughput(runs, cell) for cell in of_time),
            joined(predicted_throughput(runs, cell) for cell in of_size),
            " / ".join(MISSING if size is None else str(size) for size in batches),
        )
        rows.append((str(count), *cells))
    return TextTable("cuts", "AmoebaNet-D (18, 256), K = 2 / 4 / 8", columns, rows)


def work(runs: Runs) -> TextTable:
    columns = (
        *("model", "step on 2 devices, s", "forward on 8, ms emulated"),
        *("beyond the prediction, ms an action", "2 to 8 ranks, predicted", "measured"),
    )
    rows = []
    for workload in WORKLOADS:
        two, eight = (Cell(workload, ranks, 32) for ranks in (2, 8))
        times = seconds(runs, two), mean_forward(runs, eight), milliseconds_per_action(runs, eight)
        rows.append((workload.name, *map(figure, (*times, *speed_up(runs, workload)))))
    return TextTable("work", "M = 32: the work of a model, and its speed-up", columns, rows)


def step_parts(runs: Runs) -> TextTable:
    columns, found = ["part", "paper, K = 2"], []
    for ranks in paper.RANKS:
        columns += [f"K = {ranks}, predicted", "measured"]
        found += [predicted_breakdown(runs, ranks), breakdown(runs, ranks)]
    rows = []
    for part in PARTS:
        shares = [paper.BREAKDOWN.get(part), *(each[part] if each else None for each in found)]
        rows.append((part, *(MISSING if s is None else f"{100 * s:.1f} %" for s in shares)))
    return TextTable("breakdown", "AmoebaNet-D (18, 256), M = 32", tuple(columns), rows)


def schedule_table(runs: Runs) -> TextTable:
    columns = (
        *("schedule", "micro-batches/s, simulated", "measured"),
        *("an update, ms", "fullest rank, MB, simulated", "measured", "by rank, measured"),
    )
    rows = []
    for variant in schedules.VARIANTS:
        expected = runs.get(f"simulate {variant.title}")
        found = runs.get(f"schedule {variant.title}")
        rows.append(
            (
                variant.title,
                f"{expected['rate']:.2f}" if expected else MISSING,
                str(of_steps(found["rates"])) if found else MISSING,
                f"{found['update_ms']:.1f}" if found else MISSING,
                megabytes([max(expected["peaks"])]) if expected else MISSING,
                megabytes([max(found["peaks"])]) if found else MISSING,
                megabytes(found["peaks"]) if found else MISSING,
            )
        )
    return TextTable("schedules", "The same work on 4 ranks", columns, rows)


def megabytes(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size / 1e6:.1f}" for size in sizes)


def plans(runs: Runs) -> TextTable:
    columns = ("model", "K", "`sl.plan` chooses", "faster than GPipe, M = 32")
    rows = []
    for name in BY_NAME:
        for ranks in paper.RANKS:
            run = runs.get(f"plan {name} K={ranks}")
            if run is None:
                continue
            own = seconds(runs, Cell(BY_NAME[name], ranks, 32))
            chosen, gain = run["plan"] or "nothing fits", MISSING
            if run["plan"] and own:
                gain = f"{own / run['step']:.2f} ×"
            rows.append((name, str(ranks), chosen, gain))
    return TextTable("plans", "What a plan would do with these devices", columns, rows)


TABLES: tuple[Callable[[Runs], TextTable], ...] = (
    table2,
    cuts,
    table3,
    work,
    step_parts,
    schedule_table,
    plans,
)
