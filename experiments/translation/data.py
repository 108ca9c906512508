"""What models are trained and tested on: the corpus, its vocabulary and its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments.translation.batches import Example, examples, reversed_examples, to_english
from experiments.translation.corpus import MIN_TEST_STRINGS, Corpus, Pair, read_corpus
from experiments.translation.vocabulary import Vocabulary, train_vocabulary

FEW = "few"  # the group of languages with too few test strings to report each alone


@dataclass(frozen=True)
class Data:
    """A corpus with its vocabulary."""

    corpus: Corpus
    vocabulary: Vocabulary

    @cached_property
    def key(self) -> str:
        """Digits that tell this corpus and vocabulary from others."""
        return digest([str(len(self.vocabulary)), *_lines(self.corpus)])

    @cached_property
    def to_english(self) -> dict[str, list[Example]]:
        return examples(self.corpus.training, self.vocabulary)

    @cached_property
    def from_english(self) -> dict[str, list[Example]]:
        return reversed_examples(self.corpus.training, self.vocabulary)

    def only(self, language: str) -> Data:
        """Return the data of one language, in the shared vocabulary."""
        return Data(self.corpus.only(language), self.vocabulary)

    def held_out(self, part: str, language: str) -> list[tuple[Pair, Example]]:
        """Return the pairs of a part that are short enough for the model."""
        pairs = self.corpus.parts[part][language]
        every = [(pair, to_english(pair, self.vocabulary)) for pair in pairs]
        return [(pair, example) for pair, example in every if example.fits]

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Languages that are scored together: each alone if it has enough test strings."""
        sizes = {name: len(self.held_out("test", name)) for name in self.corpus.languages}
        alone = {name: (name,) for name, size in sizes.items() if size >= MIN_TEST_STRINGS}
        few = tuple(name for name in sizes if name not in alone)
        return alone | ({FEW: few} if few else {})


def load_data(
    folder: Path,
    vocabulary_size: int,
    catalogues: Sequence[Path] = (),
    languages: Sequence[str] = (),
) -> Data:
    """Return the corpus and its vocabulary, which is kept in `folder`.

    The corpus is Django's and that of further catalogues, of some languages or of all.
    """
    corpus = read_corpus(catalogues, languages)
    path = folder / f"vocabulary-{vocabulary_size}-{digest(_lines(corpus))}.json"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        train_vocabulary(corpus, vocabulary_size).save(unfinished)
        unfinished.replace(path)
    return Data(corpus, Vocabulary.load(path))


def digest(lines: Iterable[str]) -> str:
    """Return eight hexadecimal digits that identify a text."""
    found = hashlib.blake2b(digest_size=4)
    for line in lines:
        found.update(f"{line}\n".encode())
    return found.hexdigest()


def _lines(corpus: Corpus) -> Iterable[str]:
    for language, pairs in corpus.training.items():
        yield from (f"{language}\t{pair.english}\t{pair.other}" for pair in pairs)
