"""Batches by number of tokens, with languages sampled by temperature.

    draw a language for each of a pool of pairs ─► sort by length ─► cut into batches ─► shuffle

A language with a share p of the pairs is drawn with a probability proportional to p^(1/T): T = 1
draws languages as often as they occur, T = 100 nearly evenly. GPipe and this experiment use T = 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.translation.corpus import ENGLISH, Pair
from experiments.translation.vocabulary import END, PAD, START, Vocabulary

MAX_SOURCE, MAX_TARGET = 30, 16  # tokens, with the special ones
POOL = 16  # batches that are drawn, and sorted by length, at a time


class Example(NamedTuple):
    """The tokens of a source and of its translation, which ends with END."""

    source: list[int]
    target: list[int]

    @property
    def length(self) -> int:
        return max(len(self.source), len(self.target))

    @property
    def fits(self) -> bool:
        return len(self.source) <= MAX_SOURCE and len(self.target) <= MAX_TARGET


Batch = tuple[dict[str, Tensor], Tensor]  # what the model reads, and the target


def sampling_probabilities(counts: Sequence[int], temperature: float) -> Tensor:
    """Return the probability of each language: its share to the power of 1 / temperature.

    >>> sampling_probabilities([900, 100], temperature=1.0).tolist()
    [0.9, 0.1]
    >>> sampling_probabilities([900, 100], temperature=2.0).tolist()
    [0.75, 0.25]
    """
    counted = torch.tensor(counts, dtype=torch.float64)
    weights = (counted / counted.sum()) ** (1 / temperature)
    return weights / weights.sum()


def to_english(pair: Pair, vocabulary: Vocabulary) -> Example:
    return Example(vocabulary.source(pair.other, ENGLISH), [*vocabulary.tokens(pair.english), END])


def from_english(pair: Pair, language: str, vocabulary: Vocabulary) -> Example:
    return Example(vocabulary.source(pair.english, language), [*vocabulary.tokens(pair.other), END])


def examples(
    parts: Mapping[str, Sequence[Pair]], vocabulary: Vocabulary
) -> dict[str, list[Example]]:
    """Return the examples to English of each language, without those that are too long."""
    found = {
        language: [to_english(pair, vocabulary) for pair in pairs]
        for language, pairs in parts.items()
    }
    return {language: [e for e in every if e.fits] for language, every in found.items()}


def reversed_examples(
    parts: Mapping[str, Sequence[Pair]], vocabulary: Vocabulary
) -> dict[str, list[Example]]:
    """Return the examples from English to each language, without those that are too long."""
    found = {
        language: [from_english(pair, language, vocabulary) for pair in pairs]
        for language, pairs in parts.items()
    }
    return {language: [e for e in every if e.fits] for language, every in found.items()}


@dataclass(frozen=True)
class TokenBatches:
    """A loader for `sl.fit`, whose epochs are pools of batches.

    `directions` has the examples of each language to English, and from it; `share` of the examples
    are to English. All random numbers are from torch's generator, which `fit` seeds before each
    epoch, so a run that was interrupted draws the same batches again.
    """

    directions: tuple[Mapping[str, Sequence[Example]], Mapping[str, Sequence[Example]]]
    num_tokens: int
    temperature: float
    share: float

    def __iter__(self) -> Iterator[Batch]:
        batches = list(cut_by_tokens(self.pool(), self.num_tokens))
        for number in torch.randperm(len(batches)).tolist():
            yield collate(batches[number])

    def pool(self) -> list[Example]:
        """Return examples for about POOL batches, at random."""
        tokens, drawn = 0, []
        while tokens < POOL * self.num_tokens:
            drawn += self.draw(256)
            tokens = sum(example.length for example in drawn)
        return drawn

    def draw(self, count: int) -> list[Example]:
        """Return examples whose languages are sampled by temperature."""
        num_from = int(torch.bernoulli(torch.full((count,), 1 - self.share)).sum())
        into, out_of = self.directions
        return self._draw(into, count - num_from) + self._draw(out_of, num_from)

    def _draw(self, by_language: Mapping[str, Sequence[Example]], count: int) -> list[Example]:
        if not count:
            return []
        every = [examples for examples in by_language.values() if examples]
        weights = sampling_probabilities([len(each) for each in every], self.temperature)
        languages = torch.multinomial(weights, count, replacement=True).tolist()
        places = torch.rand(count).tolist()
        return [every[i][int(at * len(every[i]))] for i, at in zip(languages, places, strict=True)]


def cut_by_tokens(pool: Sequence[Example], num_tokens: int) -> Iterator[list[Example]]:
    """Yield batches of similar lengths whose padded sizes are at most `num_tokens`.

    A single example may be longer.
    """
    batch: list[Example] = []
    for example in sorted(pool, key=lambda each: (each.length, len(each.target))):
        if batch and (len(batch) + 1) * example.length > num_tokens:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def collate(batch: Sequence[Example]) -> Batch:
    """Return padded tensors: source, target shifted by one (the model's prefix), and target."""
    target = pad([example.target for example in batch])
    prefix = pad([[START, *example.target[:-1]] for example in batch])
    return {"source": pad([example.source for example in batch]), "prefix": prefix}, target


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of tokens as one tensor."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
