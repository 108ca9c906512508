"""What all commands have in common: errors, help, interrupts and closed pipes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.invoke import invoke

import stageline
from stageline.cli.app import BAD_INPUT
from stageline.schedules.build import schedule_names


@pytest.mark.parametrize("arguments", [["verify", "no.such:model"], ["demo", "x", "--schedule"]])
def test_commands_that_compare_with_a_plain_loop_refuse_asynchronous_schedules(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = invoke(capsys, *arguments, "pipedream")
    assert code == BAD_INPUT
    assert err.startswith("error: 'pipedream' is asynchronous: its weights change while")
    assert "use one of naive, gpipe, 1f1b" in err
    assert "2bw" not in err


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(capsys, "--version")[:2] == (0, f"{stageline.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "zbw"], "schedule 'zbw' is not known: did you mean 'zbv'?"),
        (["draw", "1f1b", "-p", "0"], "num_ranks is 0, but has to be a whole number from 1 up"),
        (["draw", "1f1b", "-v", "2"], "chunks_per_rank was given for '1f1b', which takes none"),
        (["draw", "nowhere.csv"], "'nowhere.csv' cannot be read: No such file or directory"),
        (["draw", "1f1b", "--forward", "1,x"], "--forward is '1,x', but has to be a number"),
        (["draw", "1f1b", "--forward", "-1"], "forward is -1.0, but a cost is a finite number"),
        (["draw", "1f1b", "--forward", "1,2"], "forward has 2 values, but the schedule has 4"),
        (
            ["draw", "1f1b", "--save", "x.png"],
            "x.png cannot be saved: use .svg, .html, .json or .csv",
        ),
        (["simulate", "1f1b", "gpipe", "--save", "x.svg"], "--save was given with 2 schedules"),
        (["draw", "zb_1p", "--memory-limit", "tiny"], "'tiny' is not a size in bytes"),
        (["draw", "zb_1p", "--memory-limit", "22GiB"], "an activation takes 1 bytes: give costs"),
        (["draw", "zb_1p", "--time-budget", "0"], "time_budget is 0.0, but has to be a number of"),
        (["draw", "1f1b", "--save", "nowhere/x.svg"], "use a file in a folder that exists"),
        (["simulate", "foo", "bar"], "none of the schedules can be built\nfoo: schedule 'foo'"),
        (["simulate", "1f1b", "gpipe", "-v", "3"], "chunks_per_rank was given, but none of 1f1b"),
        (["draw", "pipedream", "--replicas", "3,x"], "--replicas is '3,x', but has to be a number"),
        (["draw", "pipedream", "--replicas", "2,1"], "replicas is [2, 1], but must be one"),
        (["draw", "gpipe", "--replicas", "2,2"], "replicas was given for 'gpipe'"),
        (["draw", "1f1b", "--vertical-sync"], "vertical_sync was given for '1f1b'"),
        (["draw", "1f1b", "--num-minibatches", "0"], "num_minibatches is 0, but has to be a whole"),
        (["simulate", "1f1b", "gpipe", "--replicas", "2,2"], "replicas was given, but none of"),
        (["links", "-n", "1"], "--num-processes is 1, but a link needs 2 processes: use"),
        (["links", "--save", "nowhere/x.json"], "use a file in a folder that exists"),
        (["plan", "x.json", "--batch-size", "8"], "no cluster was given: give --num-devices and"),
    ],
)
def test_an_error_is_printed_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = invoke(capsys, *arguments)
    assert code == BAD_INPUT
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


COMMANDS = [
    *("demo", "draw", "simulate", "show", "profile", "links", "plan", "verify", "run"),
    *("report", "studio"),
]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "--help")
    assert code == 0
    assert re.findall(r"^│ (\w+)  ", out, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, command, "--help")
    assert code == 0
    assert re.search(rf"^ +stageline {command} \S", out, re.MULTILINE)


def test_help_lists_every_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("draw", "simulate", "verify"):
        _, out, _ = invoke(capsys, command, "--help")
        assert all(name in out for name in schedule_names())


COMMAND = [sys.executable, "-m", "stageline"]


@pytest.mark.parametrize(
    "words", [["simulate", "1f1b", "-p", "200", "-m", "9"], ["draw", "gpipe", "-p", "99"]]
)
def test_files_are_saved_even_if_the_reader_of_the_output_is_gone(
    words: list[str], tmp_path: Path
) -> None:
    """As in `stageline simulate … --save x.html | head -3`, if head ends before any output."""
    files = [tmp_path / name for name in ("x.html", "x.svg", "x.json", "x.csv")]
    saves = [word for path in files for word in ("--save", str(path))]
    process = subprocess.Popen(
        [*COMMAND, *words, *saves], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    printed = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert printed.splitlines() == [f"wrote {path}" for path in files]
    assert all(path.stat().st_size > 1000 for path in files)


def test_standard_output_may_be_closed(tmp_path: Path) -> None:
    line = f"{shlex.join(COMMAND)} draw 1f1b --save {tmp_path / 'x.svg'} >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path / 'x.svg'}\n")


def test_a_full_disk_is_an_error_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "draw", "1f1b"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_ctrl_c_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stageline.cli.options.build_schedule", interrupt)
        assert invoke(capsys, "draw", "zb_1p") == (130, "", "interrupted\n")
