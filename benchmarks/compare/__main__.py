"""The command: python -m benchmarks.compare pipelines | host | memory | one-rank | … | all."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import typer
from benchmarks.compare.cells import ablation as ablations
from benchmarks.compare.cells import by_hand as hand
from benchmarks.compare.cells import emulated as emulation
from benchmarks.compare.cells import host as hosts
from benchmarks.compare.cells import memory as memories
from benchmarks.compare.cells import one_rank as single
from benchmarks.compare.cells import pipelines as lines
from benchmarks.compare.contestants.torch_pipelining import SCHEDULES
from benchmarks.compare.launch import Failure, Group, run_groups
from benchmarks.compare.machine import machine
from benchmarks.compare.report.drawings import draw_all
from benchmarks.compare.report.outcome import summary
from benchmarks.compare.report.tables import print_all
from benchmarks.compare.settings import (
    Folder,
    Quick,
    Rounds,
    ScheduleFilter,
    Settings,
    WorkloadFilter,
    chosen_schedules,
    chosen_workloads,
)
from benchmarks.compare.workloads import REAL, UNEVEN, WORKLOADS
from rich.console import Console

app = typer.Typer(
    help="Stageline beside its peers, in turns. What is stored is not measured again.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console(width=180, highlight=False)
ROUNDS = 15
REAL_NAMES = [workload.name for workload in REAL]


@app.command()
def pipelines(
    workload: WorkloadFilter = None,
    schedule: ScheduleFilter = None,
    rounds: Rounds = ROUNDS,
    quick: Quick = False,
    folder: Folder = None,
) -> None:
    """Every schedule of torch on every workload, with the same cut; and the baselines."""
    settings = Settings.of(rounds, quick, folder)
    names = chosen_workloads(workload, REAL_NAMES if quick else list(WORKLOADS))
    chosen = chosen_schedules(schedule, lines.SCHEDULES)
    measure(settings, lines.groups(names, chosen, settings.rounds, is_quick=quick))


@app.command()
def host(
    num_ranks: int = 2, rounds: Rounds = ROUNDS, quick: Quick = False, folder: Folder = None
) -> None:
    """Microseconds of an action with layers that do almost nothing, by micro-batches."""
    settings = Settings.of(rounds, quick, folder)
    counts = hosts.QUICK if quick else hosts.MICROBATCHES
    measure(settings, hosts.groups(counts, num_ranks, settings.rounds))


@app.command()
def memory(
    workload: WorkloadFilter = None,
    schedule: ScheduleFilter = None,
    quick: Quick = False,
    folder: Folder = None,
) -> None:
    """Peak memory of each rank, Stageline and torch in processes of their own."""
    settings = Settings.of(ROUNDS, quick, folder)
    names = [name for name in chosen_workloads(workload, REAL_NAMES) if name in REAL_NAMES]
    chosen = chosen_schedules(schedule, tuple(SCHEDULES))
    measure(settings, memories.groups(names, chosen, is_quick=quick))


@app.command("one-rank")
def one_rank(rounds: Rounds = ROUNDS, quick: Quick = False, folder: Folder = None) -> None:
    """The demo's GPT on one rank, and on two threads, beside a plain loop."""
    settings = Settings.of(rounds, quick, folder)
    runs = {
        name: partial(single.measure, settings.rounds, has_dropout=has_dropout)
        for name, has_dropout in single.names().items()
    }
    measure_here(settings, runs)


@app.command()
def emulated(rounds: Rounds = ROUNDS, quick: Quick = False, folder: Folder = None) -> None:
    """Threads on emulated accelerators, beside a bare loop of threads and queues."""
    settings = Settings.of(rounds, quick, folder)
    milliseconds = 1.0 if quick else emulation.MILLISECONDS
    ranks = emulation.RANKS[:2] if quick else emulation.RANKS
    runs = {
        name: partial(emulation.measure, *cell, milliseconds, settings.rounds)
        for name, cell in emulation.names(ranks, milliseconds).items()
    }
    measure_here(settings, runs)


@app.command("by-hand")
def by_hand(
    workload: WorkloadFilter = None,
    rounds: Rounds = ROUNDS,
    quick: Quick = False,
    folder: Folder = None,
) -> None:
    """What sl.plan makes of uneven models, beside what is done by hand, in the same memory."""
    settings = Settings.of(rounds, quick, folder)
    names = [name for name in chosen_workloads(workload, UNEVEN) if name in UNEVEN]
    stored = settings.results.read
    measure_in_order(
        settings,
        lambda: hand.hand_memory(names, is_quick=quick),
        lambda: hand.turns(names, stored(), settings.rounds, is_quick=quick),
        lambda: hand.plan_memory(names, stored(), is_quick=quick),
    )


@app.command()
def ablation(
    workload: WorkloadFilter = None,
    rounds: Rounds = ROUNDS,
    quick: Quick = False,
    folder: Folder = None,
) -> None:
    """Stageline over processes, beside itself with one fast path off."""
    settings = Settings.of(rounds, quick, folder)
    names = chosen_workloads(workload, ablations.WORKLOADS_OF)
    measure(settings, ablations.groups(names, settings.rounds, is_quick=quick))


@app.command()
def report(quick: Quick = False, folder: Folder = None) -> None:
    """Print tables, draw pictures and write summary.json from what is stored."""
    write_report(Settings.of(ROUNDS, quick, folder))


@app.command("all")
def run_all(rounds: Rounds = ROUNDS, quick: Quick = False, folder: Folder = None) -> None:
    """Run every command, one after another: hours, on a machine where nothing else runs."""
    for command in (one_rank, emulated, host, by_hand, memory, ablation, pipelines):
        given: dict[str, Any] = {} if command is memory else {"rounds": rounds}
        command(**given, quick=quick, folder=folder)


def measure(settings: Settings, groups: Sequence[Group]) -> None:
    """Measure groups of cells in processes of their own, and report."""
    measure_in_order(settings, lambda: groups)


def measure_in_order(settings: Settings, *parts: Callable[[], Sequence[Group]]) -> None:
    """Measure parts that need the results of those before; report, and exit if a cell failed."""
    failures: list[Failure] = []
    kinds: set[str] = set()
    for part in parts:
        groups = part()
        kinds |= kinds_of(name for group in groups for name in group.cells)
        failures += run_groups(groups, settings.results, console.print)
    write_report(settings, kinds)
    for failure in failures:
        console.print(f"\nfailed: {failure.name}", style="red")
        console.print(failure.output, markup=False)
    if failures:
        raise typer.Exit(1)


def measure_here(settings: Settings, runs: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Measure cells in this process, and report."""
    for name, run in runs.items():
        console.print(name)
        settings.results.run_once(name, partial(with_machine, run), seed=0)
    write_report(settings, kinds_of(runs))


def with_machine(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a cell with their circumstances."""
    return {"machine": machine()} | run()


def kinds_of(names: Iterable[str]) -> set[str]:
    """Return the kinds of these cells, whose tables are printed."""
    return {name.partition(" | ")[0] for name in names}


def write_report(settings: Settings, kinds: set[str] | None = None) -> None:
    """Print the tables of some kinds or all, draw the pictures and write summary.json."""
    runs = settings.results.read()
    print_all(
        {name: run for name, run in runs.items() if not kinds or kinds_of([name]) <= kinds}, console
    )
    draw_all(runs, settings.folder)
    path = settings.folder / "summary.json"
    path.write_text(json.dumps(summary(runs) | {"machine": machine()}, indent=1) + "\n")
    console.print(f"\n{len(runs)} cells in {settings.results.path}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends ranks too
    app()
