"""sl.fit on 2, 3 and 4 processes, with every pair of save_every and report_every from 1 to 10.

    python benchmarks/fit_pairs.py              900 runs, 40 minutes on two busy cores
    python benchmarks/fit_pairs.py --ranks 2 --form background     100 of them

Every run trains 20 steps and saves in the background ("background", as `fit` does), waits for each
save ("waiting"), or streams with optimizers of the pipeline's own ("stream"). Its weights have to
be those of a run in one process, to the bit. Processes are started once for many runs.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed.fork_servers import fork_servers
from tests.distributed.launch import launch

FORMS = ("background", "waiting", "stream")
PER_START = 25  # runs of one group of processes
PATIENCE = 600.0  # seconds that these may take


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="How many processes: 2, 3, 4.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="How to save; all if omitted.")] = None,
    largest: Annotated[int, typer.Option(help="The largest interval.")] = 10,
) -> None:
    """Run all pairs, and count the runs that did what they should."""
    sizes = range(1, largest + 1)
    lines = [f"{s} {r} {f}" for f, s, r in product(form or FORMS, sizes, sizes)]
    counts = ranks or [2, 3, 4]
    good = 0
    with Progress() as bar, fork_servers():
        task = bar.add_task("runs", total=len(counts) * len(lines))
        for num_ranks in counts:
            for start in range(0, len(lines), PER_START):
                part = lines[start : start + PER_START]
                done = _run(num_ranks, part)
                good += done
                bar.update(task, advance=len(part))
                bar.console.print(f"{num_ranks} processes: {done} of {len(part)} runs, {part[-1]}")
    total = len(counts) * len(lines)
    print(f"{good} of {total} runs without failure, on {counts} processes")
    raise SystemExit(good < total)


def _run(num_ranks: int, lines: list[str]) -> int:
    """How many of them went well before the first that did not."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "runs"
        path.write_text("\n".join(lines))
        ends = launch("fit_pairs", num_ranks, folder, str(path), timeout=PATIENCE)
    if any(ended.code for ended in ends):
        print("\n".join(ended.output[-3000:] for ended in ends))
    return ends[0].output.count("done ")


if __name__ == "__main__":
    typer.run(main)
