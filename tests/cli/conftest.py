from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def user_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Path]]:
    """Write a module into a new current folder; return the folder."""
    modules: list[str] = []

    def write(name: str, code: str) -> Path:
        (tmp_path / f"{name}.py").write_text(code)
        modules.append(name)
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write
    for name in modules:
        sys.modules.pop(name, None)
