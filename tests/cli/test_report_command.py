"""`stageline report`: what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.invoke import invoke
from tests.runs.folders import write_run

from stageline.cli.app import BAD_INPUT


def test_report_is_written_beside_the_run_and_findings_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    code, out, err = invoke(capsys, "report", str(folder))
    assert code == 0
    assert out.startswith("run: finished, step 100\n")
    assert 'another schedule: use schedule="zb_h1"' in out
    assert err == f"wrote {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_several_runs_make_one_page_and_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("before", "after"):
        write_run(tmp_path / name)
    code, _, err = invoke(capsys, "report", "before", "after", "--markdown", "runs.md")
    assert (code, err) == (0, "wrote runs.html\nwrote runs.md\n")
    assert "| before | after |" in Path("runs.md").read_text()


def test_what_could_not_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "timeline.json").write_text("{")
    code, _, err = invoke(capsys, "report", str(folder))
    assert code == 0
    assert "note: run: timeline.json was not read: invalid json" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is not a folder: give one that exists"),
        (["."], "is not the folder of a run: it has neither run.json nor metrics.jsonl"),
        (["run", "--output", "nowhere/x.html"], "use a file in a folder that exists"),
        (["run", "--output", "run/run.json"], "exists and is not a report: give another file"),
        (["run", "--markdown", "run"], "run exists and is not a report: give another file"),
    ],
)
def test_report_that_cannot_be_made_is_an_error_of_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    code, _, err = invoke(capsys, "report", *arguments)
    assert code == BAD_INPUT
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "run" / "report.html").exists()
