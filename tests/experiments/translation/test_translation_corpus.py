from __future__ import annotations

import gettext
from pathlib import Path

import django
import pytest
from experiments.translation.catalogues import (
    Message,
    read_folder,
    read_mo,
    read_po,
)
from experiments.translation.cleaning import clean, cleaned_pairs, key
from experiments.translation.corpus import Corpus, part_of, read_corpus, split
from experiments.translation.errors import TranslationError

AUTH = Path(django.__file__).parent / "contrib/auth/locale"
GERMAN = AUTH / "de/LC_MESSAGES/django.mo"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus(languages=["de", "cs", "lb"])


def test_a_compiled_catalogue_has_the_translations_that_gettext_finds() -> None:
    with GERMAN.open("rb") as file:
        known = gettext.GNUTranslations(file)
    messages = list(read_mo(GERMAN))
    assert len(messages) > 50
    for sources, translations in messages:
        if len(sources) == 1:
            assert known.gettext(sources[0]) == translations[0]
        else:
            forms = tuple(known.ngettext(sources[0], sources[1], number) for number in (1, 2))
            assert forms == translations


def test_a_catalogue_and_its_compiled_form_have_the_same_messages() -> None:
    compiled, source = set(read_mo(GERMAN)), set(read_po(GERMAN.with_suffix(".po")))
    assert compiled == source


def test_fuzzy_and_missing_translations_are_left_out(tmp_path: Path) -> None:
    entries = [
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8"',
        '#, fuzzy\nmsgid "one"\nmsgstr "eins"',
        'msgid "two"\nmsgstr ""',
        'msgctxt "number"\nmsgid "thr"\n"ee"\nmsgstr "dr"\n"ei"',
        '#~ msgid "four"\n#~ msgstr "vier"',
    ]
    path = tmp_path / "de.po"
    path.write_text("\n\n".join(entries), encoding="utf-8")
    assert list(read_folder(tmp_path)) == [("de", Message(("three",), ("drei",)))]


@pytest.mark.parametrize("content", [b"", b"no catalogue, but text of more than 28 bytes"])
def test_a_file_that_is_no_catalogue_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "de.mo").write_bytes(content)
    with pytest.raises(TranslationError, match=r"de\.mo' is no compiled catalogue"):
        list(read_folder(tmp_path))


def test_a_folder_without_catalogues_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TranslationError, match=r"has no \.mo or \.po files"):
        read_corpus([tmp_path])
    with pytest.raises(TranslationError, match="is no folder"):
        read_corpus([tmp_path / "missing"])


def test_a_language_that_no_catalogue_has_is_refused() -> None:
    with pytest.raises(TranslationError, match="no catalogue is in the language 'xx'"):
        read_corpus(languages=["de", "xx"])


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("%(count)d of %s", "¤ of ¤"),
        ("{{ name }} and {name}", "¤ and ¤"),
        ("%(value).1f million", "¤ million"),
        ("100% sure", "100% sure"),
        ("a  <a href='%s'>link</a>.", "a link."),
        ("“It’s”", '"It\'s"'),
        ("a < b > c", "a < b > c"),
    ],
)
def test_placeholders_and_markup_are_cleaned(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (("S", "Sa"), "one letter"),
        (("URL", "URL"), "not translated"),
        (("%d day", "ein Tag"), "the placeholder is lost"),
    ],
)
def test_what_cannot_be_learned_from_is_left_out(pair: tuple[str, str], reason: str) -> None:
    assert list(cleaned_pairs(iter([pair, ("Yes", "Ja")]))) == [("Yes", "Ja")], reason


def test_no_test_string_is_seen_in_any_language(corpus: Corpus) -> None:
    keys = {
        part: {key(pair.english) for pairs in languages.values() for pair in pairs}
        for part, languages in corpus.parts.items()
    }
    assert all(keys.values())
    assert not keys["test"] & (keys["training"] | keys["validation"])
    assert not keys["training"] & keys["validation"]


def test_a_plural_that_is_another_message_does_not_leak() -> None:
    test_string = next(f"entry {i}" for i in range(99) if part_of(f"entry {i}") == "test")
    training = next(f"item {i}" for i in range(99) if part_of(f"item {i}") == "training")
    messages = [
        ("de", Message((training, test_string), ("Ding", "Dinge"))),
        ("de", Message((test_string,), ("Eintrag",))),
    ]
    found = split(messages)
    assert [pair.english for pair in found.training["de"]] == [training]
    assert [pair.other for pair in found.test["de"]] == ["Eintrag"]


def test_no_pair_is_there_twice(corpus: Corpus) -> None:
    for pairs in corpus.training.values():
        assert len(set(pairs)) == len(pairs)


def test_languages_are_ordered_by_data(corpus: Corpus) -> None:
    assert corpus.languages == ("cs", "de", "lb")


def test_added_catalogues_add_languages_and_move_no_string(tmp_path: Path) -> None:
    strings = [f"string number {i}" for i in range(60)]
    entries = [f'msgid "{text}"\nmsgstr "tlh {text}"' for text in strings]
    (tmp_path / "tlh.po").write_text("\n\n".join(entries), encoding="utf-8")
    before = read_corpus(languages=["lb"])
    after = read_corpus([tmp_path], ["lb", "tlh"])
    assert {part: pairs["lb"] for part, pairs in after.parts.items()} == {
        part: pairs["lb"] for part, pairs in before.parts.items()
    }
    assert sum(len(pairs["tlh"]) for pairs in after.parts.values()) == len(strings)
