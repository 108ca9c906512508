"""How a command measures, and where its results are: options that all commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from benchmarks.compare.cells.pipelines import SCHEDULES
from benchmarks.compare.workloads import WORKLOADS
from experiments.results import Results

HERE = Path(__file__).parent
QUICK_ROUNDS = 2

Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count, after two that do not.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny models and 2 rounds, in seconds: a smoke test.")
]
Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of results.json and the pictures; what it has is not run again."),
]
WorkloadFilter = Annotated[
    list[str] | None, typer.Option("--workload", help="A name or the start of one; repeatable.")
]
ScheduleFilter = Annotated[
    list[str] | None, typer.Option("--schedule", help=f"One of {', '.join(SCHEDULES)}; repeatable.")
]


class Settings(NamedTuple):
    """The number of rounds, whether models are tiny, and the folder of results."""

    rounds: int
    is_quick: bool
    folder: Path

    @staticmethod
    def of(rounds: int, quick: bool, folder: Path | None) -> Settings:
        """Return the settings; quick results are never among real ones."""
        chosen = folder or (HERE / "quick" if quick else HERE)
        return Settings(QUICK_ROUNDS if quick else rounds, quick, chosen)

    @property
    def results(self) -> Results:
        return Results(self.folder / "results.json")


def chosen_workloads(given: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return the workloads that begin with a given name, such as `gpt` or `emulated p=2`."""
    if not given:
        return list(default)
    if unknown := [start for start in given if not any(n.startswith(start) for n in WORKLOADS)]:
        raise typer.BadParameter(
            f"--workload is {unknown[0]!r}, but must begin one of {', '.join(WORKLOADS)}"
        )
    return [name for name in WORKLOADS if name.startswith(tuple(given))]


def chosen_schedules(given: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return the schedules that are given, or all."""
    if unknown := sorted(set(given or ()) - set(default)):
        raise typer.BadParameter(
            f"--schedule is {unknown[0]!r}, but must be one of {', '.join(default)}"
        )
    return list(given or default)
