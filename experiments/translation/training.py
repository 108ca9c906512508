"""Train one model by its recipe, and test it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch.optim.lr_scheduler import LambdaLR

import stageline as sl
from experiments.translation.batches import Example, TokenBatches, collate, cut_by_tokens
from experiments.translation.data import Data, digest
from experiments.translation.decoding import Search, beam_search, translate_all
from experiments.translation.errors import TranslationError
from experiments.translation.model import (
    BOTH,
    Size,
    Stability,
    forward,
    num_parameters,
    num_tokens,
    smoothed_loss,
    translation_model,
)
from experiments.translation.scores import Texts, score, write_translations

TEMPERATURE = 5.0  # the paper's
SMOOTHING = 0.1
CHECKPOINTS = 8  # of a run


@dataclass(frozen=True)
class Recipe:
    """Everything that a model's weights depend on, beside the data.

    `language` is that of a bilingual model; None is all. `share` of the examples are translated
    into English, the rest from it. The learning rate rises for `warmup` steps, and falls to 0.
    """

    size: Size
    steps: int
    width: int = 64
    language: str | None = None
    batch_tokens: int = 1024
    seed: int = 0
    share: float = 1.0
    rate: float = 4e-3
    warmup: int = 40
    dropout: float = 0.1
    max_norm: float | None = 1.0
    stability: Stability = BOTH

    @property
    def name(self) -> str:
        """Return a name for tables and logs."""
        who = f"{self.language} " if self.language else ""
        where = "into English" if self.share == 1 else "both ways"
        return (
            f"{who}{self.size} {where}, {self.steps} steps of {self.batch_tokens} tokens, "
            f"seed {self.seed}"
        )

    def key(self, data: Data) -> str:
        """Return digits that tell this recipe on these data from all others."""
        return digest([repr(self), data.key])


def pipeline(
    recipe: Recipe, data: Data, *, num_ranks: int = 1, num_microbatches: int = 1
) -> sl.Pipeline:
    """Return a new model in a pipeline, whose loss is weighted by tokens that are no padding."""
    torch.manual_seed(recipe.seed)
    layers = translation_model(
        recipe.size,
        vocabulary=len(data.vocabulary),
        width=recipe.width,
        dropout=recipe.dropout,
        stability=recipe.stability,
    )
    options = sl.Options(seed=recipe.seed, count_fn=num_tokens)
    loss = partial(smoothed_loss, SMOOTHING)
    return sl.Pipeline(
        layers, loss, num_ranks=num_ranks, num_microbatches=num_microbatches, options=options
    )


def batches(recipe: Recipe, data: Data) -> TokenBatches:
    """Return the loader of a recipe."""
    directions = (data.to_english, data.from_english if recipe.share < 1 else {})
    return TokenBatches(directions, recipe.batch_tokens, TEMPERATURE, recipe.share)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the factor of the learning rate at a step: up during warm-up, then down to 0.

    >>> recipe = Recipe(Size(1, 8, 1), steps=300, warmup=100)
    >>> [learning_rate(recipe, step) for step in (0, 99, 200, 299)]
    [0.01, 1.0, 0.5, 0.005]
    """
    rising = (step + 1) / recipe.warmup if recipe.warmup else 1.0
    return min(1.0, rising, (recipe.steps - step) / (recipe.steps - recipe.warmup))


def place(recipe: Recipe, data: Data, runs: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return runs / recipe.key(data)


@contextmanager
def trained(
    recipe: Recipe, data: Data, runs: Path, *, report_every: int = 100
) -> Iterator[sl.Pipeline]:
    """Train a model, or resume or load it if its folder has a checkpoint; yield its pipeline."""
    chosen = data.only(recipe.language) if recipe.language else data
    with pipeline(recipe, chosen) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=recipe.rate, betas=(0.9, 0.98))
        sl.fit(
            pipe,
            batches(recipe, chosen),
            optimizer,
            steps=recipe.steps,
            folder=place(recipe, data, runs),
            save_every=max(recipe.steps // CHECKPOINTS, 1),
            report_every=report_every,
            keep=1,
            scheduler=LambdaLR(optimizer, partial(learning_rate, recipe)),
            max_norm=recipe.max_norm,
        )
        pipe.eval()
        yield pipe


def loaded(recipe: Recipe, data: Data, runs: Path) -> sl.LayerSequence:
    """Return a trained model's layers from its checkpoint."""
    folder = place(recipe, data, runs)
    if not sl.latest(folder):
        raise TranslationError(
            f"{recipe.name} has no checkpoint in {str(folder)!r}: run "
            "`python -m experiments.translation train` first"
        )
    with pipeline(recipe, data) as pipe:
        sl.load(folder, pipe)
        pipe.eval()
        return pipe.layers


def tested(recipe: Recipe, data: Data, runs: Path) -> dict[str, Any]:
    """Train a model and return its size, its loss and its scores on the test strings."""
    with trained(recipe, data, runs) as pipe:
        chosen = data.only(recipe.language) if recipe.language else data
        texts = translations(pipe.layers, chosen, "test")
        write_translations(place(recipe, data, runs) / "translations", texts)
        scores = {group: score(*both) for group, both in texts.items()}
        return {
            "recipe": recipe.name,
            "key": recipe.key(data),
            "parameters": num_parameters(pipe.layers),
            "loss": round(mean_loss(pipe.layers, chosen, "test"), 4),
            "validation_loss": round(mean_loss(pipe.layers, chosen, "validation"), 4),
            "bleu": {group: found.corpus for group, found in scores.items()},
            "sentence_bleu": {group: found.sentence for group, found in scores.items()},
            **(validation_score(pipe.layers, chosen) if recipe.language else {}),
        }


def validation_score(layers: sl.LayerSequence, data: Data) -> dict[str, float]:
    """Return the BLEU by which a baseline's number of steps is chosen."""
    (both,) = translations(layers, data, "validation").values()
    return {"validation_bleu": score(*both).corpus}


def translations(
    layers: sl.LayerSequence, data: Data, part: str, search: Search = beam_search
) -> dict[str, Texts]:
    """Translate the strings of a part from all languages into English, by group of languages."""
    found = {name: data.held_out(part, name) for name in data.corpus.languages}
    sources = [example.source for every in found.values() for _, example in every]
    results = track(
        translate_all(layers, sources, search), "translating", total=len(sources), transient=True
    )
    tokens = dict(results)
    texts = (data.vocabulary.text(tokens[number]) for number in range(len(sources)))
    hypotheses = {name: list(islice(texts, len(every))) for name, every in found.items()}
    return {
        group: Texts(
            [text for name in names for text in hypotheses[name]],
            [pair.english for name in names for pair, _ in found[name]],
        )
        for group, names in data.groups.items()
    }


@torch.no_grad()
def mean_loss(layers: sl.LayerSequence, data: Data, part: str) -> float:
    """Return the negative log-likelihood of a token of English, in nats."""
    every: list[Example] = [
        example for name in data.corpus.languages for _, example in data.held_out(part, name)
    ]
    total, count = 0.0, 0
    for inputs, target in map(collate, cut_by_tokens(every, 4096)):
        total += float(smoothed_loss(0.0, forward(layers, **inputs), target))
        count += int(num_tokens(target))
    return total / count
