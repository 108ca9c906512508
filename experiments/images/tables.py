"""Tables of the results, for the terminal and for the README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from experiments.images import paper
from experiments.images.plan import Scale
from experiments.images.summary import Runs, capacities, transfers
from experiments.images.training import Training

MARKERS = "<!-- results -->", "<!-- end of results -->"


class Sheet(NamedTuple):
    """A table before it is rendered."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def sheets(scale: Scale, runs: Runs) -> list[Sheet]:
    """Return the tables that have at least one row."""
    every = capacity_sheet(scale, runs), transfer_sheet(scale, runs), parity_sheet(scale, runs)
    return [sheet for sheet in every if sheet.rows]


def capacity_sheet(scale: Scale, runs: Runs) -> Sheet:
    columns = ("AmoebaNet (L, D)", "parameters", "accuracy in %, mean ± s (runs)", "in the paper")
    rows = [
        (point.model, f"{point.parameters:,}", str(point.found), "")
        for point in capacities(scale, runs)
    ]
    if rows:
        rows.append(("B(18,512)", "557M", "", f"{paper.IMAGENET * 100:.1f} on ImageNet 2012"))
    return Sheet(f"Trained on {scale.task}", columns, rows)


def transfer_sheet(scale: Scale, runs: Runs) -> Sheet:
    columns = ("source → target", "images", "fine-tuned", "from scratch", "gain")
    rows = [
        (
            f"{each.source} → {each.target}, {each.share:.0%}",
            str(each.images),
            str(each.tuned),
            str(each.scratch),
            f"{each.gain.mean * 100:+.1f} ± {each.gain.spread * 100:.1f}",
        )
        for each in transfers(scale, runs)
    ]
    return Sheet("Transfer: accuracy in %, mean ± s (runs)", columns, rows)


def parity_sheet(scale: Scale, runs: Runs) -> Sheet:
    columns = ("model", "steps", "tensors", "equal on 1 and 4 partitions", "weights")
    found = [(run, runs[name]) for run in scale.parity() if (name := parity_name(run)) in runs]
    rows = [
        (
            f"{run.cells}({run.num_layers},{run.num_filters})",
            str(run.recipe.steps),
            str(made["tensors"]),
            str(made["equal"]),
            made["weights"],
        )
        for run, made in found
    ]
    return Sheet("Same bits", columns, rows)


def parity_name(run: Training) -> str:
    return f"parity {run.name}"


def paper_sheet() -> Sheet:
    rows = [(name, f"{value * 100:.1f}") for name, value in paper.TRANSFER.items()]
    title = f"The paper's transfer: {paper.MODEL}, mean of {paper.NUM_RUNS} runs"
    return Sheet(title, ("target", "accuracy in %"), rows)


def rich_table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", header_style="bold")
    for number, column in enumerate(sheet.columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def markdown(sheet: Sheet) -> str:
    lines = [sheet.columns, ("---",) * len(sheet.columns), *sheet.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{sheet.title}**\n\n{body}\n"


def environment_line(runs: Runs) -> str:
    """Return what the runs were made with, and how long they took."""
    facts = {f"{key} {value}" for run in runs.values() for key, value in run["environment"].items()}
    minutes = sum(run["seconds"] for run in runs.values()) / 60
    return f"{len(runs)} runs of {minutes:.0f} minutes in total; {', '.join(sorted(facts))}.\n"


def write_readme(path: Path, scale: Scale, runs: Runs) -> None:
    """Put the tables between the markers."""
    before, rest = path.read_text(encoding="utf-8").split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    texts = [markdown(sheet) for sheet in (*sheets(scale, runs), paper_sheet())]
    text = "\n".join([*texts, environment_line(runs)])
    path.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{after}", encoding="utf-8")
