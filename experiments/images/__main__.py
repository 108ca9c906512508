"""The command: train AmoebaNet on images, transfer it, vary its capacity, compare bits, report.

python -m experiments.images all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from experiments.results import Results, Run

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

    def train_all(self, trainings: Sequence[Training]) -> None:
        """Train and test what the file of results does not have."""
        for number, run in enumerate(trainings, start=1):
            console.print(f"[bold]{run.name}[/bold] ({number} of {len(trainings)})")
            self._run_once(run.name, run, train)

    def compare_all(self) -> None:
        """Compare 1 and 4 partitions; end with an error if a bit differs."""
        for run in self.scale.parity():
            console.print(f"[bold]{parity_name(run)}[/bold]")
            found = self._run_once(parity_name(run), run, compare)
            if found["equal"] < found["tensors"]:
                console.print(f"{found['first difference']} differs", style="red")
                raise typer.Exit(1)

    def _run_once(
        self, name: str, run: Training, make: Callable[[Training, Path], dict[str, Any]]
    ) -> Run:
        """Return a run of the file, whose settings have to be these, or make it."""
        settings = {"settings": run.settings}
        runs = self.folder / "runs"
        made = self.results.run_once(name, lambda: make(run, runs) | settings, seed=run.seed)
        if made["settings"] != run.settings:
            raise typer.BadParameter(
                f"{self.results.path} has {name!r} with settings {made['settings']}, but they are "
                f"{run.settings} now: delete that line, or use another --folder"
            )
        return made

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
        Path | None,
        typer.Option(file_okay=False, help="For results, pictures and checkpoints."),
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
    context.obj.train_all(context.obj.scale.trainings())
    context.obj.show()


@app.command()
def capacity(context: typer.Context) -> None:
    """Train networks of several sizes L and D."""
    context.obj.train_all(context.obj.scale.capacity())
    context.obj.show()


@app.command()
def transfer(context: typer.Context) -> None:
    """Fine-tune a trained network on another task, and compare with training from scratch."""
    context.obj.train_all(context.obj.scale.transfer())
    context.obj.show()


@app.command()
def parity(context: typer.Context) -> None:
    """Train on 1 and on 4 partitions, and compare every parameter and buffer bit for bit."""
    context.obj.compare_all()
    context.obj.show()


@app.command()
def report(context: typer.Context) -> None:
    """Print the tables and draw the pictures of the results that are there."""
    context.obj.show()


@app.command("all")
def make_all(context: typer.Context) -> None:
    """Run all of the above."""
    scale = context.obj.scale
    context.obj.compare_all()
    context.obj.train_all([*scale.trainings(), *scale.transfer(), *scale.capacity()])
    context.obj.show()


if __name__ == "__main__":
    app()
