"""Old names of options and commands: they work, with a warning that says what to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.invoke import invoke

from stageline.cli.deprecated import RENAMED, current_command

SCRIPT = "import sys; print(sys.argv[1:])"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("draw 1f1b --ranks 2 --microbatches 3", "draw 1f1b --num-ranks 2 --num-microbatches 3"),
        ("draw 1f1b --ranks=2", "draw 1f1b --num-ranks=2"),
        ("draw --chunks 3 interleaved_1f1b", "draw --chunks-per-rank 3 interleaved_1f1b"),
        ("simulate gpipe 1f1b --minibatches 3", "simulate gpipe 1f1b --num-minibatches 3"),
    ],
)
def test_an_old_option_does_what_the_new_one_does(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = invoke(capsys, *old.split())
    assert (code, out) == invoke(capsys, *new.split())[:2]
    pairs = zip(old.split(), new.split(), strict=True)
    renamed = [(o.partition("=")[0], n.partition("=")[0]) for o, n in pairs if o != n]
    assert err.splitlines() == [f"warning: {o} is deprecated: write {n}" for o, n in renamed]


def test_a_new_option_gives_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(capsys, "draw", "1f1b", "--num-ranks", "2")[2] == ""
    assert invoke(capsys, "draw", "1f1b", "-p", "2", "-m", "3")[2] == ""


@pytest.mark.parametrize("command", RENAMED)
def test_help_shows_new_names_only(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = invoke(capsys, command, "--help")
    words = out.replace("[", " ").replace(",", " ").split()
    for old, new in RENAMED[command].items():
        assert new in words
        assert old not in words


def test_an_error_about_an_old_option_names_the_new_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = invoke(capsys, "draw", "1f1b", "--ranks", "two")
    assert code == 2
    assert "Invalid value for '--num-ranks'" in err


def test_old_options_of_plan_reach_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ["--ranks", "1", "--devices", "0", "--memory", "1GiB", "--batch", "4"]
    code, _, err = invoke(capsys, "plan", str(tmp_path / "x.json"), *old)
    assert code == 2
    assert err.splitlines()[:3] == [
        "warning: --ranks is deprecated: write --jobs",
        "warning: --batch is deprecated: write --batch-size",
        "warning: --devices is deprecated: write --num-devices",
    ]
    assert "num_devices is 0" in err.splitlines()[3]


def test_profile_links_is_the_links_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "profile", "--links", "--ranks", "1", "--memory", "1GiB")
    assert code == 2
    assert err.splitlines()[:2] == [
        "warning: stageline profile --links is deprecated: write stageline links",
        "warning: --ranks is deprecated: write --num-processes",
    ]
    assert "error: --num-processes is 1, but a link needs 2 processes" in err
    assert current_command(["draw", "--links"]) == ["draw", "--links"]


def test_under_torchrun_one_process_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert invoke(capsys, "draw", "1f1b", "--ranks", "2")[2] == ""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stageline", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_options_after_the_script_are_for_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--num-processes", "3", "-p", "4", "--ranks", "5", "--help", "x", "--max-restarts"]
    ended = run("-n", "1", str(script), *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{options}\n"


def test_run_takes_both_old_names_of_num_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = run("--ranks", "2", "-p", "1", str(script))
    assert (ended.returncode, ended.stdout) == (0, "[]\n")
    assert ended.stderr.splitlines() == [
        "warning: --ranks is deprecated: write --num-processes",
        "warning: -p is deprecated: write --num-processes",
    ]
