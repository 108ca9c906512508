from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from stageline.errors import ReportError
from stageline.report.text.grid import plain
from stageline.report.timeline import Timeline


def test_the_suffix_chooses_the_picture(two_ranks: Timeline, tmp_path: Path) -> None:
    for name in ("a.svg", "a.html", "a.json", "B.SVG"):
        two_ranks.save(tmp_path / name)
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "a.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]
    assert (tmp_path / "B.SVG").read_bytes() == (tmp_path / "a.svg").read_bytes()


def test_a_timeline_is_imported_without_what_draws_it() -> None:
    code = "import sys, stageline.report.timeline; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "stageline.report.timeline" in loaded
    assert not loaded & {
        "rich",
        "torch",
        "json",
        "stageline.report.svg.drawing",
        "stageline.report.text.grid",
    }


def test_drawing_needs_no_torch() -> None:
    code = "import sys, stageline.report.save, stageline.report.text.terminal; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in run.stdout.split()


def test_another_suffix_is_refused_before_anything_is_written(
    two_ranks: Timeline, tmp_path: Path
) -> None:
    with pytest.raises(ReportError) as caught:
        two_ranks.save(tmp_path / "x.png")
    assert str(caught.value) == (
        "'x.png' ends in .png, but a timeline is saved as .svg, .html or .json: use one of them"
    )
    with pytest.raises(ReportError, match="'picture' has no suffix, but"):
        two_ranks.save(str(tmp_path / "picture"))
    assert not list(tmp_path.iterdir())


def test_a_timeline_prints_as_its_grid(
    two_ranks: Timeline, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.stdout.write(str(two_ranks))
    assert capsys.readouterr().out == plain(two_ranks)


def test_in_a_terminal_it_is_as_wide_as_the_terminal(
    two_ranks: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(os.environ, "COLUMNS", "18")
    assert str(two_ranks) == plain(two_ranks, width=18) != plain(two_ranks)
