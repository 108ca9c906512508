"""Bubble rates of the Zero Bubble paper's tables 5 and 8 (arXiv 2401.10241), beside ours.

python benchmarks/zero_bubble_rates.py [ROWS.csv]     prints the table, about a minute
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import stageline as sl

ROWS = Path(__file__).parents[1] / "tests" / "figures" / "zero_bubble_rates.csv"
MODELS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
INTERLEAVED_CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}  # in table 5; 2 in table 8
SEQUENCE = 1024


def costs(row: dict[str, str], chunks: int) -> sl.Costs:
    """The row's times for one of `chunks`; table 8 gives them for halves, table 5 for wholes."""
    share = (2 if row["table"] == "8" else 1) / chunks
    forward, input_grad, weight_grad = (share * float(row[name]) for name in "FBW")
    hidden, heads = MODELS[row["model"]]
    activation, retained = 34 * hidden + 5 * heads * SEQUENCE, 32 * hidden
    return sl.Costs(
        forward,
        input_grad,
        weight_grad,
        float(row["c"]),
        activation=activation / chunks,
        retained=retained / chunks,
    )


def rate(name: str, row: dict[str, str], chunks: int) -> tuple[float, float]:
    """The bubble rate of a schedule, and the least that its memory allows."""
    options: dict[str, Any] = {"costs": costs(row, chunks)} if name in ("zb_2p", "zbv") else {}
    if name == "interleaved_1f1b":
        options["chunks_per_rank"] = chunks
    schedule = sl.build_schedule(
        name, num_ranks=int(row["p"]), num_microbatches=int(row["m"]), **options
    )
    timeline = sl.simulate(schedule, costs(row, chunks))
    least = 1 - max(timeline.busy) / timeline.span_lower_bound
    return timeline.span_bubble, max(0.0, least)


def cell(name: str, column: str, row: dict[str, str], chunks: int) -> str:
    if not row[column]:
        return ""
    ours, least = rate(name, row, chunks)
    bound = f" [dim]({least:.4f})[/dim]" if name in ("zb_2p", "zbv") else ""
    return f"{float(row[column]):.4f}  [b]{ours:.4f}[/b]{bound}"


def main(path: Path) -> None:
    table = Table(title="bubble rate: paper, [b]ours[/b], (proven least for the memory)", box=None)
    for column in ("model", "p", "m", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_2p", "zbv"):
        table.add_column(column, justify="right")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    for row in track(rows, "simulating and searching", transient=True):
        chunks = INTERLEAVED_CHUNKS[row["model"]] if row["table"] == "5" else 2
        cells = [
            cell("1f1b", "r_1f1b", row, 1),
            cell("interleaved_1f1b", "r_1f1b_i", row, chunks),
            cell("zb_h1", "r_zb_h1", row, 1),
            cell("zb_h2", "r_zb_h2", row, 1),
            cell("zb_2p", "r_zb_2p", row, 1),
            cell("zbv", "r_zbv", row, 2),
        ]
        table.add_row(row["model"], row["p"], row["m"], *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
