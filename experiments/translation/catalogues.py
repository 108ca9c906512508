"""Read gettext catalogues, compiled (.mo) or not (.po), as messages and their translations.

Compiled catalogues (the format is in gettext's manual) start with seven numbers of 32 bits:

    magic │ revision │ N │ offset of N source strings │ offset of N translations │ hash table …

Each of the two tables has N pairs (length, offset). A context is joined to its string by \\x04, and
the singular to the plural by \\x00, as are the plural forms of a translation.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.translation.errors import TranslationError

MAGIC = 0x950412DE
CHARSET = re.compile(r"charset=([\w-]+)")
FIELD = re.compile(r'^(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*(".*")\s*$')


class Message(NamedTuple):
    """A string in English, in singular and perhaps plural, and its forms in another language."""

    sources: tuple[str, ...]
    translations: tuple[str, ...]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield English and its translation: the singular with the first form, and with the last
        form the plural; what other forms are for depends on the language.

        >>> list(Message(("day", "days"), ("dzień", "dni", "dni")).pairs())
        [('day', 'dzień'), ('days', 'dni')]
        """
        yield self.sources[0], self.translations[0]
        if len(self.sources) > 1:
            yield self.sources[1], self.translations[-1]


def read_folder(folder: Path, languages: Collection[str] = ()) -> Iterator[tuple[str, Message]]:
    """Yield the language and the message of each entry in the catalogues below a folder.

    Catalogues of all languages are read, unless some are given.

    Of a catalogue that is there twice, the compiled one is read.
    """
    if not folder.is_dir():
        raise TranslationError(f"{str(folder)!r} is no folder: give one with .mo or .po files")
    paths = sorted(path for path in folder.rglob("*.[mp]o") if path.suffix in READERS)
    chosen = {path.with_suffix(""): path for path in reversed(paths)}  # .mo sorts before .po
    if not chosen:
        raise TranslationError(f"{str(folder)!r} has no .mo or .po files: give another folder")
    for path in sorted(chosen.values()):
        if not languages or language_of(path) in languages:
            for message in READERS[path.suffix](path):
                yield language_of(path), message


def language_of(path: Path) -> str:
    """Return the language that a catalogue's place or its name says.

    >>> language_of(Path("locale/pt_BR/LC_MESSAGES/django.mo")), language_of(Path("po/de.po"))
    ('pt_BR', 'de')
    """
    name = path.parent.parent.name if path.parent.name == "LC_MESSAGES" else path.stem
    return name.split(".")[0]  # de.UTF-8 is a name, too


def read_mo(path: Path) -> Iterator[Message]:
    """Yield the messages of a compiled catalogue; its header, the message "", is left out."""
    data = path.read_bytes()
    if len(data) < 28 or MAGIC not in struct.unpack_from("<I", data) + struct.unpack_from(
        ">I", data
    ):
        raise TranslationError(
            f"{str(path)!r} is no compiled catalogue: compile it with msgfmt again"
        )
    order = "<" if struct.unpack_from("<I", data)[0] == MAGIC else ">"
    count, *tables = struct.unpack_from(f"{order}3I", data, 8)
    columns = [_strings(data, order, table, count) for table in tables]
    charset = CHARSET.search(columns[1][0].decode("latin-1")) if count else None
    encoding = charset[1] if charset else "utf-8"
    for source, translation in zip(*columns, strict=True):
        if source:
            yield _message(source.decode(encoding), translation.decode(encoding))


def _strings(data: bytes, order: str, table: int, count: int) -> list[bytes]:
    numbers = struct.unpack_from(f"{order}{2 * count}I", data, table)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [data[start : start + length] for length, start in pairs]


def _message(source: str, translation: str) -> Message:
    without_context = source.rsplit("\x04", maxsplit=1)[-1]
    return Message(tuple(without_context.split("\0")), tuple(translation.split("\0")))


def read_po(path: Path) -> Iterator[Message]:
    """Yield the translated messages of a catalogue; fuzzy and obsolete ones are left out."""
    for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        lines = block.splitlines()
        if any(line.startswith("#,") and "fuzzy" in line for line in lines):
            continue
        fields = _fields(lines)
        sources = [fields[key] for key in ("msgid", "msgid_plural") if key in fields]
        translations = [fields[key] for key in sorted(fields) if key.startswith("msgstr")]
        if sources and sources[0] and all(translations):
            yield Message(tuple(sources), tuple(translations))


def _fields(lines: list[str]) -> dict[str, str]:
    """Return the strings of an entry by keyword; lines without one continue the last."""
    fields: dict[str, str] = {}
    keyword = ""
    for line in lines:
        if found := FIELD.match(line):
            keyword = found[1] or keyword
            fields[keyword] = fields.get(keyword, "") + ast.literal_eval(found[2])
    return fields


READERS = {".mo": read_mo, ".po": read_po}
