"""BLEU of a language's translations, as sacrebleu computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import sacrebleu


class Texts(NamedTuple):
    """Translations and what they should be."""

    hypotheses: Sequence[str]
    references: Sequence[str]


@dataclass(frozen=True)
class Score:
    """BLEU over all sentences, and the average BLEU of a sentence."""

    corpus: float
    sentence: float


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Return both scores.

    >>> score(["the page was not found"], ["the page was not found"])
    Score(corpus=100.0, sentence=100.0)
    """
    whole = sacrebleu.corpus_bleu(hypotheses, [references]).score
    pairs = zip(hypotheses, references, strict=True)
    parts = [sacrebleu.sentence_bleu(hypothesis, [one]).score for hypothesis, one in pairs]
    return Score(round(whole, 4), round(mean(parts), 4))


def write_translations(folder: Path, texts: Mapping[str, Texts]) -> None:
    """Write what `python -m sacrebleu NAME.references -i NAME.hypotheses` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, both in texts.items():
        for kind, lines in both._asdict().items():
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{name}.{kind}").write_text(text, encoding="utf-8")
