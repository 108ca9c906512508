"""The corpus: pairs of English and another language, split by the English string.

Whether a string is for training, validation or testing depends on the string alone, so a test
string is seen in no language, and stays a test string if catalogues are added.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import django

from experiments.translation.catalogues import Message, read_folder
from experiments.translation.cleaning import clean, cleaned_pairs, key
from experiments.translation.errors import TranslationError

ENGLISH = "en"
PARTS = ("training", "validation", "test")
# Where each part begins, as a share of the English strings in the order of their hashes. Settings
# were chosen by the scores of the last 12 %: so those are trained on, and test strings are others.
BORDERS = ((0.0, "training"), (0.71, "test"), (0.83, "validation"), (0.88, "training"))
MIN_TEST_STRINGS = 30  # BLEU of a language with fewer is not reported alone


class Pair(NamedTuple):
    """An English string and its translation."""

    english: str
    other: str


@dataclass(frozen=True)
class Corpus:
    """Pairs by part and language; languages are in order of decreasing training data."""

    parts: Mapping[str, Mapping[str, Sequence[Pair]]]

    @property
    def training(self) -> Mapping[str, Sequence[Pair]]:
        return self.parts["training"]

    @property
    def validation(self) -> Mapping[str, Sequence[Pair]]:
        return self.parts["validation"]

    @property
    def test(self) -> Mapping[str, Sequence[Pair]]:
        return self.parts["test"]

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """Languages from the most training pairs to the fewest."""
        return tuple(self.training)

    def only(self, language: str) -> Corpus:
        """Return the pairs of one language, for a bilingual model."""
        return Corpus({part: {language: pairs[language]} for part, pairs in self.parts.items()})


def read_corpus(folders: Iterable[Path] = (), languages: Sequence[str] = ()) -> Corpus:
    """Return the corpus of Django's catalogues and of further folders, of all or some languages."""
    places = [*folders, Path(django.__file__).parent]
    corpus = split(found for folder in places for found in read_folder(folder, languages))
    if missing := sorted(set(languages) - set(corpus.languages)):
        raise TranslationError(f"no catalogue is in the language {missing[0]!r}: use another name")
    return corpus


def split(messages: Iterable[tuple[str, Message]]) -> Corpus:
    """Split messages, which come with their language, into the parts of a corpus.

    Both forms of a plural are in the same part. A pair that occurs again is left out.
    """
    found: dict[str, dict[str, dict[Pair, None]]] = {part: defaultdict(dict) for part in PARTS}
    for language, message in messages:
        if language.split("_")[0] != ENGLISH:  # en_GB is translated by copying
            for english, other in cleaned_pairs(message.pairs()):
                found[part_of(message.sources[0])][language][Pair(english, other)] = None
    _remove_leaks(found)
    counts = {language: len(pairs) for language, pairs in found["training"].items()}
    if not counts:
        raise TranslationError(
            "no string is left after cleaning: give a folder with other catalogues"
        )
    order = sorted(counts, key=lambda language: (-counts[language], language))
    return Corpus({p: {name: tuple(found[p][name]) for name in order} for p in PARTS})


def _remove_leaks(found: Mapping[str, Mapping[str, dict[Pair, None]]]) -> None:
    """Remove training and validation pairs whose English is that of a test string.

    The plural of one message can be the singular of another.
    """
    held_out = {key(pair.english) for pairs in found["test"].values() for pair in pairs}
    for part in ("validation", "training"):
        for pairs in found[part].values():
            for pair in [pair for pair in pairs if key(pair.english) in held_out]:
                del pairs[pair]
        held_out |= {key(pair.english) for pairs in found[part].values() for pair in pairs}


def part_of(english: str) -> str:
    """Return the part that a string is in; it depends on its words alone.

    >>> part_of("Hello %(name)s!") == part_of("<b>hello</b> %s")
    True
    """
    digest = hashlib.blake2b(key(clean(english)).encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    return next(part for begin, part in reversed(BORDERS) if place >= begin)
