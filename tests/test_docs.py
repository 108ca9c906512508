"""What the pages of docs/ and benchmarks/ show is what happens: their Python and their commands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)])
    return model, nn.functional.mse_loss, torch.randn(32, 16), torch.randn(32, 16)
"""


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def names_processes(code: str) -> bool:
    """Whether it is one of several processes that run it."""
    return "init_process_group" in code


def run(code: str, page: Path, names: dict[str, object]) -> None:
    """Comments that begin with an arrow tell the value of their line."""
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
        exec(compile(text, page.name, "exec"), names)  # noqa: S102  it is our own page
        told = re.fullmatch(r"(.*?) +# → (.*)", lines[(statement.end_lineno or 1) - 1])
        if told:
            assert str(eval(told[1], names)) == told[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the reader is: a model of theirs, and the examples of the repository."""
    (tmp_path / "my_model.py").write_text(MODEL)
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_model", None)


def test_there_is_python_to_run() -> None:
    found = {page.name: len(blocks(page, "python")) for page in PAGES}
    assert found["planning.md"] >= 5
    assert found["scaling.md"] >= 1


def for_one_process(page: Path) -> list[str]:
    return [code for code in blocks(page, "python") if not names_processes(code)]


@pytest.mark.parametrize(
    "page", [*filter(for_one_process, PAGES)], ids=lambda page: str(page.relative_to(ROOT))
)
@pytest.mark.usefixtures("folder")
def test_the_python_of_a_page_runs_as_it_stands(page: Path) -> None:
    """From top to bottom, in one session."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for code in for_one_process(page):
        run(code, page, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, id=f"{page.name}-{number}")
        for page in PAGES
        for number, code in enumerate(blocks(page, "python"))
        if names_processes(code)
    ],
)
def test_python_for_several_processes_runs_in_as_many(page: Path, code: str, folder: Path) -> None:
    ranks = re.search(r"--num-processes (\d+)", code)
    assert ranks, f"{page.name} does not say how many"
    (folder / "train.py").write_text(code)
    assert shell(f"stageline run --num-processes {ranks[1]} train.py", folder) == 0


def commands() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for code in blocks(page, "", "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                words = line.partition("  #")[0].strip()
                if re.match(r"(stageline|python|torchrun|sudo|export|[A-Z_]+=)\b", words):
                    yield page, words


def is_for_one_machine(command: str) -> bool:
    return command.startswith(("stageline ", "python examples/"))


def shell(command: str, folder: Path) -> int:
    """As the reader would type it, with this Python's own `stageline`."""
    words = shlex.split(command)
    start = {"stageline": [sys.executable, "-m", "stageline"], "python": [sys.executable]}
    done = subprocess.run(
        [*start[words[0]], *words[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    sorted({page for page, command in commands() if is_for_one_machine(command)}),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run_in_their_order(page: Path, folder: Path) -> None:
    for where, command in commands():
        if where == page and is_for_one_machine(command):
            assert shell(command, folder) == 0


def test_files_that_commands_name_are_there() -> None:
    """Also of commands that need two machines, or half an hour."""
    found = set()
    for page in PAGES:
        found |= set(re.findall(r"\b(?:examples|benchmarks|tests)/[\w/]+\.py\b", page.read_text()))
    assert len(found) >= 10
    assert [name for name in sorted(found) if not (ROOT / name).is_file()] == []
