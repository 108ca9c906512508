"""The command: python -m experiments.tables predict | measure | report | all."""

from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from experiments.results import Results
from experiments.tables import measure as measurement
from experiments.tables import paper, schedules
from experiments.tables.predict import cells, predict_links, predict_plan
from experiments.tables.predict import predict as predict_cell
from experiments.tables.report import write_report
from experiments.tables.workloads import WORKLOADS
from stageline.zoo.emulated import lateness

HERE = Path(__file__).parent
PARTS = ("tables", "breakdown", "schedules")
USUAL_LATENESS = 0.0003  # seconds, of a sleep on an idle machine: 0.1 ms, with some room
app = typer.Typer(
    help="GPipe's tables 2 and 3, where a step's time goes, and other schedules on the same work.",
    no_args_is_help=True,
    add_completion=False,
)
ResultsFile = Annotated[Path, typer.Option("--results", help="The file of results to go on from.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps that are measured for each figure.")]
OnlyPart = Annotated[
    list[str] | None, typer.Option("--part", help=f"One of {', '.join(PARTS)}; repeatable.")
]


@app.command()
def predict(results: ResultsFile = HERE / "results.json") -> None:
    """Estimate, cut and simulate all cells: about four minutes, most of it for shapes."""
    stored = Results(results)
    jobs = [(cell.name, predict_cell, (cell,)) for cell in cells()]
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(jobs) + 4 * len(WORKLOADS) + len(schedules.VARIANTS))
        for name, run, arguments in jobs:
            progress.update(task, description=name)
            run(stored, *arguments)
            progress.advance(task)
        for workload in WORKLOADS:
            progress.update(task, description=f"links and plans of {workload.name}")
            predict_links(stored, workload)
            progress.advance(task)
            for num_ranks in paper.RANKS:
                predict_plan(stored, workload, num_ranks)
                progress.advance(task)
        for variant in schedules.VARIANTS:
            progress.update(task, description=variant.title)
            schedules.simulate_once(stored, variant)
            progress.advance(task)
    Console().print(f"{len(stored.read())} results in {results}")


@app.command()
def measure(
    part: OnlyPart = None, steps: Steps = 5, results: ResultsFile = HERE / "results.json"
) -> None:
    """Measure on emulated accelerators: under ten minutes, on a machine where nothing else runs.

    What is in the results already is not measured again.
    """
    if unknown := sorted(set(part or ()) - set(PARTS)):
        raise typer.BadParameter(f"--part is {unknown[0]!r}, but must be one of {PARTS}")
    stored = Results(results)
    try:
        jobs = [job for job in measurement.jobs(stored) if not part or job.part in part]
    except KeyError as error:
        raise typer.BadParameter(str(error.args[0])) from error
    if lateness() > USUAL_LATENESS:
        late = f"sleeps end {1e3 * lateness():.1f} ms late"
        Console().print(f"{late}: the machine is busy, and times will be wrong", style="yellow")
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.name)
            try:
                measurement.measure(stored, job, steps)
            except CalledProcessError as error:
                raise typer.BadParameter(
                    f"the processes of {job.name!r} ended with {error.returncode}; their output is "
                    "above. What was measured is stored: run the command again"
                ) from error
            progress.advance(task)
    Console().print(f"{len(jobs)} measurements in {results}")


@app.command()
def report(
    results: ResultsFile = HERE / "results.json",
    folder: Annotated[Path, typer.Option(help="Where README.md and the pictures are.")] = HERE,
) -> None:
    """Print the tables, write them into README.md, and draw the pictures."""
    write_report(Results(results), folder, Console(width=180))


@app.command("all")
def run_all(steps: Steps = 5, results: ResultsFile = HERE / "results.json") -> None:
    """Predict, measure and report."""
    predict(results)
    measure(None, steps, results)
    report(results, HERE)


if __name__ == "__main__":
    app()
