"""What the README shows is what happens: its commands and its Python, as they stand there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from stageline import cli

README = (Path(__file__).parents[1] / "README.md").read_text()
SHELL = re.findall(r"```\n\$ (stageline .*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_commands_and_code_to_run() -> None:
    assert len(SHELL) >= 2
    assert len(PYTHON) >= 1


@pytest.mark.parametrize("block", SHELL)
def test_a_command_prints_what_the_readme_shows(
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines with an ellipsis stand for any number of lines."""
    monkeypatch.chdir(tmp_path)
    command, _, shown = block.replace("\\\n", " ").partition("\n")
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in shown.strip().splitlines():
        if line != "…":
            assert line in printed


def test_the_python_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom; comments that begin with an arrow tell the value of their line."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in PYTHON:
        for statement in ast.parse(code).body:
            text = "\n".join(code.splitlines()[statement.lineno - 1 : statement.end_lineno])
            exec(compile(text, "README.md", "exec"), names)  # noqa: S102  it is our own README
            if told := re.fullmatch(r"(.*?) +# → (.*)", text):
                assert str(eval(told[1], names)) == told[2]


def test_ten_lines_train_a_model() -> None:
    example = next(code for code in PYTHON if "sl.Pipeline(" in code)
    lines = [line for line in example.splitlines() if line and not line.startswith("import")]
    assert len(lines) == 10
