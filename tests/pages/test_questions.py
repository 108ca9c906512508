"""Questions of newcomers have their answers, and the way to them is short."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.pages.test_site import headings, without_code

DOCS = Path(__file__).parents[2] / "docs"
QUESTIONS = tomllib.loads((Path(__file__).parent / "questions.toml").read_text())["question"]


def section_of(page: str, anchor: str) -> str:
    """Return the text below a heading, up to the next one of its level."""
    text = without_code((DOCS / page).read_text())
    parts = re.split(r"^(#+ .+)$", text, flags=re.MULTILINE)[1:]
    found = [
        below
        for title, below in zip(parts[::2], parts[1::2], strict=True)
        if headings(title) == {anchor}
    ]
    return " ".join("".join(found).split())


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["section"])
def test_question_is_answered_where_it_is_said_to_be(question: dict[str, Any]) -> None:
    page, anchor = question["section"].split("#")
    text = section_of(page, anchor)
    assert [words for words in question["says"] if words not in text] == []


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["section"])
def test_answer_is_one_link_from_the_front_page(question: dict[str, Any]) -> None:
    links = set(re.findall(r"\]\((\w+\.md)", (DOCS / "index.md").read_text()))
    assert question["section"].partition("#")[0] in links


def test_there_are_ten() -> None:
    assert len(QUESTIONS) == len({question["asks"] for question in QUESTIONS}) == 10
