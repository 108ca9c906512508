"""Clean messages: placeholders become one symbol, and markup goes.

Hello <b>%(name)s</b>, you have {count} messages.  ─►  Hello ¤, you have ¤ messages.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

PLACEHOLDER = "¤"  # one token for a tokenizer as well as for BLEU
PLACEHOLDERS = re.compile(
    r"%\(\w+\)[-+ #0]*[\d.]*[a-zA-Z]"  # %(name)s of Python, %(value).1f
    r"|%[-+ #0]*(?:\d+\$)?[\d.]*l?[sdifuxcrgS]\b"  # %s, %1$s and %d of C
    r"|\{\{?[^{}]*\}?\}"  # {name} and {{ name }}
    r"|\$\{?\w+\}?"  # $name of shells
)
TAGS = re.compile(r"</?[a-zA-Z][^<>]*>|<!--.*?-->", re.DOTALL)
CURLY = str.maketrans("‘’“”", "''\"\"")


def clean(text: str) -> str:
    """Return a message as one line of plain text.

    >>> clean("Hello <b>%(name)s</b>,\\n  you have {count} messages.")
    'Hello ¤, you have ¤ messages.'
    >>> clean("Save &amp; close “%s” at 100%")
    'Save & close "¤" at 100%'
    """
    plain = html.unescape(TAGS.sub(" ", text)).translate(CURLY)
    joined = " ".join(PLACEHOLDERS.sub(PLACEHOLDER, plain).split())
    return re.sub(r"\s+([,.;:!?])(?=\s|$)", r"\1", joined)  # where a tag was


def restored(text: str, placeholders: Sequence[str]) -> str:
    """Return a translation with the placeholders of its source again, in their order.

    >>> restored("¤ Tage und ¤ Stunden", ["%d", "{hours}"])
    '%d Tage und {hours} Stunden'
    """
    left = iter(placeholders)
    return re.sub(PLACEHOLDER, lambda _: next(left, PLACEHOLDER), text)


def key(text: str) -> str:
    """Return what two strings have in common that differ only in case, marks and placeholders.

    >>> key("Hello ¤, welcome!") == key("hello, Welcome ")
    True
    """
    return " ".join(re.findall(r"\w+", text.casefold()))


def cleaned_pairs(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield cleaned pairs that are worth learning from.

    Left out is what has fewer than two letters, is not translated, or has other placeholders in the
    translation, such as "¤ day" where a language says "one day".
    """
    for source, translation in pairs:
        english, other = clean(source), clean(translation)
        has_words = min(_num_letters(english), _num_letters(other)) > 1
        if has_words and english != other and _num_holes(english) == _num_holes(other):
            yield english, other


def _num_letters(text: str) -> int:
    return sum(letter.isalpha() for letter in text)


def _num_holes(text: str) -> int:
    return text.count(PLACEHOLDER)
