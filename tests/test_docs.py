"""The pages show what happens: their Python runs, and their commands print what is shown."""

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
from docs.tree import IMPORT_ORDER, TREE
from tests.test_house import PACKAGES

from stageline import cli

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs"
DOCS = sorted([*SITE.glob("*.md"), *SITE.glob("reference/*.md")])
PAGES = [ROOT / "README.md", *DOCS, *sorted((ROOT / "benchmarks").rglob("*.md"))]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.md"))
TEXTS = [*PAGES, *EXPERIMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)])
    return model, nn.functional.mse_loss, torch.randn(32, 16), torch.randn(32, 16)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def needs_processes(code: str) -> bool:
    return "init_process_group" in code


def for_one_process(page: Path) -> list[str]:
    return [code for code in blocks(page, "python") if not needs_processes(code)]


def run(code: str, page: Path, names: dict[str, object]) -> None:
    """Run statements; a comment that begins with an arrow has the value of its line."""
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        module = ast.Module([statement], type_ignores=[])  # with decorators, which lineno is behind
        exec(compile(module, page.name, "exec"), names)  # noqa: S102  it is our own page
        shown = re.fullmatch(r"(.*?) +# → (.*)", lines[(statement.end_lineno or 1) - 1])
        if shown:
            assert str(eval(shown[1], names)) == shown[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's folder: a model of their own, and the examples of the repository."""
    (tmp_path / "my_model.py").write_text(MODEL)
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_model", None)


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_page_opens_with_its_purpose_and_a_complete_example(page: Path) -> None:
    paragraphs = page.read_text().split("\n\n")
    assert paragraphs[0].startswith("# ")
    assert paragraphs[1].startswith("After this page you can ")
    assert paragraphs[2].startswith("```")


def skip_without_frameworks(page: Path) -> None:
    """Skip a page whose code imports what is not installed, and Stageline does not need."""
    for name in ("transformers", "lightning", "accelerate"):
        if any(f"{name} import " in code for code in blocks(page, "python")):
            pytest.importorskip(name)


@pytest.mark.parametrize("page", [*filter(for_one_process, PAGES)], ids=name_of)
@pytest.mark.usefixtures("folder")
def test_python_of_page_runs_from_top_to_bottom(page: Path) -> None:
    skip_without_frameworks(page)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for code in for_one_process(page):
        run(code, page, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, id=f"{page.name}-{number}")
        for page in PAGES
        for number, code in enumerate(blocks(page, "python"))
        if needs_processes(code)
    ],
)
def test_python_for_several_processes_runs_in_as_many(page: Path, code: str, folder: Path) -> None:
    ranks = re.search(r"--num-processes (\d+)", code)
    assert ranks, f"{page.name} does not say how many"
    (folder / "train.py").write_text(code)
    assert shell(f"stageline run --num-processes {ranks[1]} train.py", folder) == 0


def outputs() -> Iterator[tuple[str, str]]:
    """Yield commands with the output that a page shows."""
    for page in PAGES:
        for code in blocks(page, ""):
            if code.startswith("$ stageline "):
                command, _, shown = code.removeprefix("$ ").replace("\\\n", " ").partition("\n")
                yield command, shown


@pytest.mark.parametrize(("command", "shown"), [*outputs()])
@pytest.mark.usefixtures("folder")
def test_command_prints_what_the_page_shows(
    command: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line with an ellipsis stands for any number of lines."""
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in shown.strip().splitlines():
        if line != "…":
            assert line in printed


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
    """Run a command as the reader would, with the `stageline` of this Python."""
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
    ids=name_of,
)
def test_commands_of_page_run_in_their_order(page: Path, folder: Path) -> None:
    skip_without_frameworks(page)
    for code in filter(needs_processes, blocks(page, "python")):
        (folder / "train.py").write_text(code)
    for where, command in commands():
        if where == page and is_for_one_machine(command):
            assert shell(command, folder) == 0


def test_files_that_pages_name_exist() -> None:
    """Include those of commands that need two machines, or half an hour."""
    pattern = r"\b(?:examples|benchmarks|tests|docs|src/stageline)/[\w/]+\.py\b"
    found = {name for page in TEXTS for name in re.findall(pattern, page.read_text())}
    assert len(found) >= 10
    assert [name for name in sorted(found) if not (ROOT / name).is_file()] == []


def test_source_files_that_the_architecture_names_exist() -> None:
    text = TREE.sub("", (ROOT / "docs" / "architecture.md").read_text())
    existing = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named) >= 40
    assert [n for n in sorted(named) if not any(e.endswith(f"/{n}") for e in existing)] == []


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_and_pictures_of_page_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_tree_of_files_is_complete() -> None:
    """`python docs/tree.py` writes it again."""
    found = TREE.search((ROOT / "docs" / "architecture.md").read_text())
    assert found
    top, *lines = found[0].splitlines()
    assert top == "src/stageline/"
    folders, files = [ROOT / "src" / "stageline"], set()
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        del folders[depth:]
        if name.endswith("/"):
            folders.append(folders[-1] / name)
            files.add(folders[-1] / "__init__.py")
        else:
            files.add(folders[-1] / name)
    assert files == set((ROOT / "src" / "stageline").rglob("*.py"))


def test_tree_of_files_is_in_the_order_of_imports() -> None:
    assert IMPORT_ORDER == PACKAGES
