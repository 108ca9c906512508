"""python -m experiments.translation: multilingual translation through a pipeline.

    python -m experiments.translation all               everything, an hour and a half on one core
    python -m experiments.translation --quick all       the same with tiny models, a few minutes
    python -m experiments.translation translate --to de "Enter a valid email address."

Every command goes on where it was interrupted: finished runs are in results.json, and the current
one resumes from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import stageline as sl
from experiments.results import Results
from experiments.translation.cleaning import PLACEHOLDERS, clean, restored
from experiments.translation.data import Data, load_data
from experiments.translation.decoding import beam_search, greedy, translate_all
from experiments.translation.drawings import draw_batch_sizes, draw_figure3, draw_stability
from experiments.translation.errors import TranslationError
from experiments.translation.experiment import (
    Experiment,
    corpus_facts,
    record_corpus,
    run_batch_size,
    run_figure3,
    run_stability,
)
from experiments.translation.parity import MICROBATCHES, different, parameters_after
from experiments.translation.scale import FULL, QUICK, Scale
from experiments.translation.tables import SHEETS, Sheet, time_facts, write_readme
from experiments.translation.training import Recipe, loaded

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console(highlight=False)


@dataclass(frozen=True)
class Place:
    """The size of the experiments, their data, and where results and checkpoints are."""

    folder: Path
    is_quick: bool
    catalogues: Sequence[Path]
    languages: Sequence[str]

    @property
    def scale(self) -> Scale:
        return QUICK if self.is_quick else FULL

    @property
    def results(self) -> Results:
        """The results; those of tiny models are among the runs, which are not committed."""
        name = "runs/quick.json" if self.is_quick else "results.json"
        return Results(self.folder / name)

    def open(self) -> Experiment:
        """Read the data."""
        runs = self.folder / "runs"
        with console.status("reading catalogues and learning the vocabulary"):
            data = load_data(runs, self.scale.vocabulary, self.catalogues, self.languages)
        return Experiment(data, self.scale, runs, self.results, console)


@app.callback()
def choose(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models: a look at the command in seconds.")
    ] = False,
    catalogues: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of .mo or .po files to add; repeatable."),
    ] = None,
    language: Annotated[
        list[str] | None,
        typer.Option(help="Use this language only; repeatable. All by default."),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Where results, pictures and, in runs/, checkpoints are kept."
        ),
    ] = HERE,
) -> None:
    """Train one Transformer between English and 96 languages through a pipeline.

    Every command goes on where it was interrupted.

    Example: python -m experiments.translation --quick all
    """
    context.obj = Place(folder, quick, catalogues or (), language or ())


@app.command()
def corpus(context: typer.Context) -> None:
    """Print how many strings each language has, after cleaning, by part."""
    data = context.obj.open().data
    facts = corpus_facts(data)
    table = Table(title="Pairs with English after cleaning", row_styles=["", "dim"])
    for column in ("language", *data.corpus.parts, "short enough to train on", "scored"):
        table.add_column(column)
    group_of = {name: group for group, names in facts["groups"].items() for name in names}
    for name in data.corpus.languages:
        counts = [len(pairs[name]) for pairs in data.corpus.parts.values()]
        scored = "alone" if group_of[name] == name else "with others"
        table.add_row(name, *map(str, (*counts, facts["training"][name])), scored)
    console.print(table)
    for part, pairs in data.corpus.parts.items():
        english = {pair.english for each in pairs.values() for pair in each}
        total = sum(map(len, pairs.values()))
        console.print(f"{part}: {total:,} pairs of {len(english):,} English strings")
    console.print(f"{len(data.corpus.languages)} languages, {len(data.vocabulary):,} subwords")


@app.command()
def train(context: typer.Context) -> None:
    """Train a model into English and from it, and print its BLEU into English by language."""
    experiment: Experiment = context.obj.open()
    recipe = experiment.scale.both_ways
    record_corpus(experiment)
    run = experiment.test("both ways", recipe)
    table = Table(title=f"{recipe.size} into English, {run['parameters']:,} parameters")
    for column in ("language", "test strings", "corpus BLEU", "mean sentence BLEU"):
        table.add_column(column)
    facts = experiment.results.read()["corpus"]
    for group, bleu in run["bleu"].items():
        scores = (f"{bleu:.1f}", f"{run['sentence_bleu'][group]:.1f}")
        table.add_row(group, str(facts["test"][group]), *scores)
    console.print(table)


def run_and_show(
    run: Callable[[Experiment], None],
    sheets: Sequence[str],
    draw: Callable[[Any, Scale, Path], None],
    picture: str,
    experiment: Experiment,
) -> None:
    """Make the runs, print their tables, and draw their picture beside the results."""
    run(experiment)
    runs = experiment.results.read()
    for name in sheets:
        console.print(SHEETS[name](runs, experiment.scale).rich())
    path = experiment.results.path.parent / picture
    draw(runs, experiment.scale, path)
    console.print(f"drawn in {path}")


show_figure3 = partial(
    run_and_show, run_figure3, ("sizes", "gains", "depth"), draw_figure3, "figure3.svg"
)
show_batch_size = partial(
    run_and_show, run_batch_size, ("batches",), draw_batch_sizes, "batch_size.svg"
)
show_stability = partial(
    run_and_show, run_stability, ("stability",), draw_stability, "stability.svg"
)


@app.command()
def figure3(context: typer.Context) -> None:
    """Compare four sizes of model with bilingual baselines, and a deep with a wide model."""
    show_figure3(context.obj.open())


@app.command()
def batch_size(context: typer.Context) -> None:
    """Train with batches over a factor of 16, at the same optimizer settings: table 5."""
    show_batch_size(context.obj.open())


@app.command()
def stability(context: typer.Context) -> None:
    """Train a deep model with and without scaled initialisation and clipped logits."""
    show_stability(context.obj.open())


@app.command()
def parity(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 5,
) -> None:
    """Train in four partitions and in one; exit with 1 unless all parameters have equal bits."""
    show_parity(context.obj.open(), steps)


def show_parity(experiment: Experiment, steps: int = 5) -> None:
    scale = experiment.scale
    recipe = Recipe(scale.sizes[-1], steps, scale.width, batch_tokens=512)
    table = Table(title=f"{recipe.size}, {steps} steps of {MICROBATCHES} micro-batches")
    for column in ("partitions", "layers of each", "parameters", "other bits than one"):
        table.add_column(column)
    one, layers = parameters_after(recipe, experiment.data, 1)
    table.add_row("1", layers, str(len(one)), "")
    four, layers = parameters_after(recipe, experiment.data, 4)
    unequal = different(one, four)
    table.add_row("4", layers, str(len(four)), ", ".join(unequal) or "none")
    console.print(table)
    if unequal:
        raise typer.Exit(1)


@app.command()
def translate(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="The sentence.")],
    to: Annotated[str, typer.Option(help="Target language, such as de, or en.")] = "en",
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses kept; 1 is greedy.")] = 4,
) -> None:
    """Translate a sentence with the checkpoint of `train`."""
    experiment: Experiment = context.obj.open()
    data: Data = experiment.data
    layers = loaded(experiment.scale.both_ways, data, experiment.runs)
    search = greedy if beam == 1 else partial(beam_search, beam=beam)
    tokens = dict(translate_all(layers, [data.vocabulary.source(clean(text), to)], search))[0]
    console.print(restored(data.vocabulary.text(tokens), PLACEHOLDERS.findall(text)), markup=False)


@app.command()
def report(context: typer.Context) -> None:
    """Print all tables and draw all pictures from the results; nothing is trained.

    The README in the folder gets its tables from here.
    """
    place: Place = context.obj
    scale, results = place.scale, place.results
    runs = results.read()
    if "corpus" not in runs:
        raise typer.BadParameter(f"{str(results.path)!r} has no results: run `all` first")
    sheets: dict[str, Sheet] = {name: make(runs, scale) for name, make in SHEETS.items()}
    for sheet in sheets.values():
        console.print(sheet.rich())
    draw_figure3(runs, scale, results.path.parent / "figure3.svg")
    draw_batch_sizes(runs, scale, results.path.parent / "batch_size.svg")
    draw_stability(runs, scale, results.path.parent / "stability.svg")
    readme = place.folder / "README.md"
    if not place.is_quick and readme.exists():
        write_readme(readme, sheets, time_facts(runs))


@app.command("all")
def run_all(context: typer.Context) -> None:
    """Run train, parity, stability, batch-size and figure3, and write the report."""
    train(context)
    experiment: Experiment = context.obj.open()
    show_parity(experiment)
    for show in (show_stability, show_batch_size, show_figure3):
        show(experiment)
    report(context)


def main() -> None:
    """Run the command; mistakes of the user are printed without a stack."""
    try:
        app()
    except (TranslationError, sl.StagelineError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
