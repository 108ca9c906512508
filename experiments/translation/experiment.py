"""Runs of the experiments: what they are, and where their results go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from experiments.results import Results, Run
from experiments.translation.data import Data
from experiments.translation.errors import TranslationError
from experiments.translation.model import Size
from experiments.translation.scale import REMEDIES, Scale
from experiments.translation.training import Recipe, place, tested, trained


@dataclass(frozen=True)
class Experiment:
    """The data, the sizes, and the places of checkpoints and results."""

    data: Data
    scale: Scale
    runs: Path
    results: Results
    console: Console

    def run(self, name: str, recipe: Recipe, make: Callable[[], Mapping[str, Any]]) -> Run:
        """Return the results of a recipe, from the file if they are there.

        Results of another recipe under the same name are refused.
        """
        self.console.print(f"[bold]{name}[/]: {recipe.name}")
        found = self.results.run_once(name, make, seed=recipe.seed)
        if found["key"] != recipe.key(self.data):
            raise TranslationError(
                f"{str(self.results.path)!r} has {name!r} of another recipe ({found['recipe']}), "
                f"but it is now {recipe.name}: delete the line, or the file"
            )
        return found

    def test(self, name: str, recipe: Recipe) -> Run:
        return self.run(name, recipe, lambda: tested(recipe, self.data, self.runs))


def multilingual_name(size: Size, seed: int) -> str:
    return f"multilingual {size} seed {seed}"


def bilingual_name(language: str, steps: int, seed: int) -> str:
    return f"bilingual {language} {steps} steps seed {seed}"


def batch_size_name(num_tokens: int, seed: int) -> str:
    return f"batch of {num_tokens} seed {seed}"


def stability_name(remedy: str, rate: float, seed: int) -> str:
    return f"stability {rate:g} {remedy} seed {seed}"


def bilingual_languages(data: Data, count: int) -> list[str]:
    """Return languages that are scored alone, spread evenly over the order by data."""
    alone = [names[0] for names in data.groups.values() if len(names) == 1]
    step = (len(alone) - 1) / max(count - 1, 1)
    return [alone[round(i * step)] for i in range(min(count, len(alone)))]


def run_figure3(experiment: Experiment) -> None:
    """Train the multilingual models of all sizes and seeds, and the bilingual baselines."""
    scale = experiment.scale
    record_corpus(experiment)
    for seed, size in product(scale.seeds, scale.sizes):
        experiment.test(multilingual_name(size, seed), scale.multilingual(size, seed))
    languages = bilingual_languages(experiment.data, scale.num_bilingual)
    for each in product(languages, scale.bilingual_steps, scale.seeds):
        experiment.test(bilingual_name(*each), scale.bilingual(*each))


def run_batch_size(experiment: Experiment) -> None:
    """Train one model with batches of different sizes, for the same number of steps."""
    scale = experiment.scale
    record_corpus(experiment)
    for each in product(scale.batch_tokens, scale.seeds):
        experiment.test(batch_size_name(*each), scale.batch_size(*each))


def run_stability(experiment: Experiment) -> None:
    """Train a deep model with and without the two remedies, at several learning rates."""
    scale = experiment.scale
    for seed, rate, remedy in product(scale.seeds, scale.deep_rates, REMEDIES):
        recipe = scale.stability(remedy, rate, seed)
        make = partial(losses, experiment, recipe)
        experiment.run(stability_name(remedy, rate, seed), recipe, make)


def losses(experiment: Experiment, recipe: Recipe) -> dict[str, Any]:
    """Train a model and return its loss at every step."""
    with trained(recipe, experiment.data, experiment.runs, report_every=1):
        pass
    found = [report["loss"] for report in reports(place(recipe, experiment.data, experiment.runs))]
    return {
        "recipe": recipe.name,
        "key": recipe.key(experiment.data),
        "losses": [round(loss, 3) for loss in found],
        "worst_rise": round(worst_rise(found), 3),
        "final": round(fmean(found[-10:]), 3),
    }


def reports(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the reports of `sl.fit`; those before an interruption are in the file as well."""
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def worst_rise(losses: list[float]) -> float:
    """Return how far the loss was at worst above the least loss before it.

    >>> worst_rise([8.0, 6.0, 7.5, 5.0, 5.5])
    1.5
    """
    least, worst = losses[0], 0.0
    for loss in losses:
        worst = max(worst, loss - least)
        least = min(least, loss)
    return worst


def record_corpus(experiment: Experiment) -> None:
    """Store which languages there are, with their data, so that reports need the file alone."""
    data = experiment.data
    experiment.results.run_once("corpus", lambda: corpus_facts(data), seed=0)


def corpus_facts(data: Data) -> dict[str, Any]:
    groups = data.groups
    return {
        "training": {name: len(data.to_english[name]) for name in data.corpus.languages},
        "test": {
            group: sum(len(data.held_out("test", name)) for name in names)
            for group, names in groups.items()
        },
        "groups": {group: list(names) for group, names in groups.items()},
        "vocabulary": len(data.vocabulary),
    }
