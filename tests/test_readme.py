"""The README is a front page; `test_docs.py` runs its code and its commands."""

from __future__ import annotations

import re
from pathlib import Path

from stageline import schedule_names

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 135


def test_ten_lines_train_a_model() -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    example = next(block for block in code if "sl.Pipeline(" in block)
    lines = [line for line in example.splitlines() if line and not line.startswith("import")]
    assert len(lines) == 10


def test_table_of_schedules_has_all_of_them() -> None:
    table = README.partition("## Schedules")[2].partition("## ")[0]
    assert {name for name in schedule_names() if f"`{name}`" not in table} == set()


def test_all_pages_are_linked_here_or_in_the_index_of_the_site() -> None:
    docs = Path(__file__).parents[1] / "docs"
    index = re.findall(r"\((\w+\.md)\)", (docs / "index.md").read_text())
    here = re.findall(r"\(docs/(\w+\.md)\)", README)
    assert {path.name for path in docs.glob("*.md")} - {"index.md"} == {*index, *here} - {
        "index.md"
    }
