"""One subword vocabulary for all languages: byte-level BPE, so that no character is unknown.

A source is `<2de> tokens </s>`: the first token says which language to translate into. A target is
read as `<s> tokens` and predicted as `tokens </s>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.translation.cleaning import PLACEHOLDER
from experiments.translation.corpus import ENGLISH, Corpus
from experiments.translation.errors import TranslationError

PAD, START, END = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with a token for each target language."""

    tokenizer: Tokenizer

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that a source can ask for."""
        return tuple(name[2:-1] for name in self.tokenizer.get_vocab() if name.startswith("<2"))

    def source(self, text: str, to: str) -> list[int]:
        """Return the tokens of a string to translate."""
        asked = self.tokenizer.token_to_id(f"<2{to}>")
        if asked is None:
            known = ", ".join(sorted(self.languages))
            raise TranslationError(f"the target language is {to!r}, but the model has only {known}")
        return [asked, *self.tokens(text), END]

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the string of tokens up to the end; special ones are left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(path))

    @staticmethod
    def load(path: Path) -> Vocabulary:
        return Vocabulary(Tokenizer.from_file(str(path)))


def train_vocabulary(corpus: Corpus, size: int) -> Vocabulary:
    """Return a vocabulary learned from the training strings of all languages.

    An English string counts once: it would otherwise outweigh every other language 96 times.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    asked = [f"<2{language}>" for language in (ENGLISH, *sorted(corpus.languages))]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *asked],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    return Vocabulary(tokenizer)


def _texts(corpus: Corpus) -> Iterable[str]:
    pairs = [pair for language in corpus.training.values() for pair in language]
    yield from sorted({pair.english for pair in pairs})
    yield from (pair.other for pair in pairs)
    yield PLACEHOLDER
