"""The command: train AmoebaNet on images, transfer it, vary its capacity, compare bits, report.

python -m experiments.images all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.images.data import FASHION, has_fashion
from experiments.images.draw import draw
from experiments.images.parity import compare
from experiments.images.plan import FULL, FULL_DIGITS, QUICK, Scale
from experiments.images.tables import parity_name, rich_table, sheets, write_readme
from experiments.images.training import Training, train
from experiments.results import Results

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console(highlight=False)


class Data(StrEnum):
    """The images that networks of several sizes are trained on."""

    fashion = "fashion"
    digits = "digits"


@dataclass(frozen=True)
class Experiment:
    """The runs, and the folder of results, pictures and checkpoints."""

    scale: Scale
    folder: Path

    @property
    def results(self) -> Results:
        return Results(self.folder / "results.json")

    def make(
        self,
        trainings: Sequence[Training],
        make: Callable[[Training, Path], Mapping[str, Any]] = train,
        name: Callable[[str], str] = str,
    ) -> None:
        """Make the runs that the file of results does not have, and check the others' settings."""
        for number, run in enumerate(trainings, start=1):
            console.print(f"[bold]{name(run.name)}[/bold] ({number} of {len(trainings)})")
            folder = run.folder(self.folder / "runs")
            made = self.results.run_once(
                name(run.name),
                lambda run=run, folder=folder: {  # type: ignore[misc]
                    **make(run, folder.parent),
                    "settings": folder.name[-8:],
                },
                seed=run.seed,
            )
            if made["settings"] != folder.name[-8:]:
                raise typer.BadParameter(
                    f"{self.results.path} has {name(run.name)!r} with settings "
                    f"{made['settings']}, but they are {folder.name[-8:]} now: delete that line, "
                    "or use another --folder"
                )

    def show(self) -> None:
        """Print the tables, draw the pictures, and write the README if the folder has one."""
        runs = self.results.read()
        if not runs:
            raise typer.BadParameter(
                f"{self.results.path} has no runs: make some with the command all"
            )
        for sheet in sheets(self.scale, runs):
            console.print(rich_table(sheet))
        for path in draw(self.folder, self.scale, runs):
            console.print(f"wrote {path}")
        readme = self.folder / "README.md"
        if readme.exists():
            write_readme(readme, self.scale, runs)


@app.callback()
def choose(
    context: typer.Context,
    data: Annotated[
        Data | None, typer.Option(help="Fashion-MNIST if it is installed, or else digits.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny networks and few steps on digits: under a minute.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="For results, pictures and checkpoints.")
    ] = None,
) -> None:
    """Train AmoebaNet on four partitions, as in GPipe's section on images.

    Every command can be killed and started again: it goes on, to the same bits.

    Example: python -m experiments.images all
    """
    is_report = context.invoked_subcommand == "report"  # needs no images
    if data is Data.fashion and not is_report and not has_fashion():
        raise typer.BadParameter(
            f"{FASHION} has no Fashion-MNIST: install Debian's package dataset-fashion-mnist, or "
            "use --data digits"
        )
    on_fashion = data is Data.fashion or (data is None and (is_report or has_fashion()))
    scale = QUICK if quick else FULL if on_fashion else FULL_DIGITS
    name = "quick" if quick else "digits"
    default = HERE if scale is FULL else HERE / "runs" / name
    context.obj = Experiment(scale, folder or default)


@app.command("train")
def train_main(context: typer.Context) -> None:
    """Train the main network with several seeds."""
    context.obj.make(context.obj.scale.trainings())
    context.obj.show()


@app.command()
def capacity(context: typer.Context) -> None:
    """Train networks of several sizes L and D."""
    context.obj.make(context.obj.scale.capacity())
    context.obj.show()


@app.command()
def transfer(context: typer.Context) -> None:
    """Fine-tune a trained network on another task, and compare with training from scratch."""
    context.obj.make(context.obj.scale.transfer())
    context.obj.show()


@app.command()
def parity(context: typer.Context) -> None:
    """Train on 1 and on 4 partitions, and compare every parameter and buffer bit for bit."""
    _compare(context.obj)
    context.obj.show()


@app.command()
def report(context: typer.Context) -> None:
    """Print the tables and draw the pictures of the results that are there."""
    context.obj.show()


@app.command("all")
def make_all(context: typer.Context) -> None:
    """Run all of the above."""
    _compare(context.obj)
    scale = context.obj.scale
    context.obj.make([*scale.trainings(), *scale.transfer(), *scale.capacity()])
    context.obj.show()


def _compare(experiment: Experiment) -> None:
    runs = experiment.scale.parity()
    experiment.make(runs, compare, parity_name)
    made = experiment.results.read()
    for run in runs:
        found = made[parity_name(run.name)]
        if found["equal"] < found["tensors"]:
            console.print(f"{run.name}: {found['first difference']} differs", style="red")
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
