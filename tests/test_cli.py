"""The command line, as a person would use it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import stageline
from stageline import cli
from stageline.schedules.build import schedule_names
from stageline.schedules.check import check
from stageline.schedules.schedule import Schedule


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["stageline", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    out, err = capsys.readouterr()
    code = stop.value.code
    assert isinstance(code, int)
    return code, out, err


def test_draw_shows_the_grid_and_its_measures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "draw", "1f1b", "--ranks", "2", "--microbatches", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == ["rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1", "rank 1 │ .. F0 B0 B0 F1 B1 B1"]
    assert "makespan 9" in lines[-1]
    assert "step bubble 33.3 %" in lines[-1]
    assert "peak activations 2" in lines[-1]


def test_one_command_gives_picture_bubble_memory_and_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("v.svg", "v.html", "v.json", "v.csv")]
    saves = [argument for path in files for argument in ("--save", str(path))]
    times = ["--forward", "1.1", "--weight-grad", "0.6", "--transfer", "0.05"]
    code, out, err = run(capsys, "simulate", "zbv", "-p", "8", "-m", "24", *times, *saves)
    assert code == 0
    assert "span bubble" in out
    assert err.splitlines() == [f"wrote {path}" for path in files]
    assert ElementTree.parse(files[0]).getroot().tag.endswith("svg")
    assert "<svg" in files[1].read_text()
    assert json.loads(files[2].read_text())["traceEvents"]
    schedule = Schedule.from_csv(files[3])
    check(schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (8, 24)


def test_a_csv_file_is_drawn_like_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1").to_csv(path)
    _, out, _ = run(capsys, "draw", str(path))
    assert out.splitlines()[0] == "rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1"
    assert "mine, 2 ranks" in out


def test_all_schedules_are_compared_for_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "all", "-p", "4", "-m", "8")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert code == 0
    assert set(schedule_names()) <= set(rows)
    # with a rank's share of the model fixed, more chunks mean less bubble, not more work
    assert float(rows["interleaved_1f1b"][0]) < float(rows["1f1b"][0])
    assert float(rows["zbv"][0]) < float(rows["zb_h1"][0])


def test_a_schedule_that_does_not_fit_is_told_beneath_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "simulate", "1f1b", "dualpipe_v", "-p", "4", "-m", "6")
    assert code == 0
    assert out.splitlines()[-1].startswith("1f1b ")
    assert err.startswith("dualpipe_v: num_microbatches is 6, but 'dualpipe_v' on 4 ranks")


def test_costs_come_from_a_file_by_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 3], "links": {"latency": 0.5}, "transfer": 0}')
    _, out, _ = run(capsys, "simulate", "gpipe", "-p", "2", "-m", "1", "--costs", str(path))
    assert out.splitlines()[1].split()[:2] == ["gpipe", "9"]  # 1 + 3 + 2 + 2 and two latencies


def test_a_number_in_a_file_of_costs_is_for_a_whole_rank_as_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": 1.5}')
    outputs = [
        run(capsys, "simulate", "1f1b", "interleaved_1f1b", *costs)[1]
        for costs in (["--costs", str(path)], ["--forward", "1.5"])
    ]
    assert outputs[0] == outputs[1]


def test_a_file_with_a_stage_on_two_ranks_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "[red].csv"
    path.write_text("0F0,0B0\n1F0,1B0\n0F0,0B0\n")
    code, _, err = run(capsys, "draw", str(path))
    assert code == cli.BAD_INPUT
    assert "rank 2 holds no stage" in err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"{stageline.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "zbw"], "schedule 'zbw' is not known: did you mean 'zbv'?"),
        (["draw", "1f1b", "-p", "0"], "num_ranks is 0, but has to be a whole number from 1 up"),
        (["draw", "1f1b", "-v", "2"], "'1f1b' was given chunks_per_rank, but takes none"),
        (["draw", "nowhere.csv"], "nowhere.csv: No such file or directory"),
        (["draw", "1f1b", "--forward", "1,x"], "--forward is '1,x', but has to be a number"),
        (["draw", "1f1b", "--forward", "-1"], "forward is -1.0, but a cost is a finite number"),
        (["draw", "1f1b", "--forward", "1,2"], "forward has 2 values, but the schedule has 4"),
        (
            ["draw", "1f1b", "--save", "x.png"],
            "x.png cannot be saved: use .svg, .html, .json or .csv",
        ),
        (["simulate", "1f1b", "gpipe", "--save", "x.svg"], "--save was given with 2 schedules"),
        (["draw", "zb_1p", "--memory-limit", "tiny"], "'tiny' is no size in bytes"),
        (["draw", "zb_1p", "--memory-limit", "22GiB"], "an activation takes 1 bytes: give costs"),
        (["draw", "zb_1p", "--time-budget", "0"], "time_budget is 0.0, but has to be a number of"),
        (["draw", "1f1b", "--save", "nowhere/x.svg"], "use a file in a folder that exists"),
        (["simulate", "foo", "bar"], "none of the schedules can be built\nfoo: schedule 'foo'"),
        (["simulate", "1f1b", "gpipe", "-v", "3"], "chunks_per_rank was given, but none of 1f1b"),
        (["profile"], "a model and --links: neither is given, but one of them is measured"),
        (["profile", "my:model", "--links"], "a model and --links: both are given"),
        (["profile", "my:model", "--memory", "1GiB"], "--memory was given, but a profile of a"),
        (["profile", "--links"], "--links was given with 1 rank, but a link needs 2"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == cli.BAD_INPUT
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list, but costs are a JSON object"),
        ('{"foward": 1}', "has foward, but costs are forward, input_grad"),
        ('{"links": {"speed": 1}}', "but a link is a latency and a bandwidth"),
        ('{"forward": "fast"}', "forward is 'fast', but a cost is a number"),
        ('{"forward": null}', "forward is None, but a cost is a number"),
    ],
)
def test_a_broken_file_of_costs_is_refused_with_its_reason(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    code, _, err = run(capsys, "draw", "1f1b", "--costs", str(path))
    assert code == cli.BAD_INPUT
    assert message in err


def test_the_demo_trains_verifies_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "demo"
    code, out, err = run(capsys, "demo", str(folder), "--steps", "2", "--schedule", "zb_h1")
    assert code == 0
    assert "parity: 8 losses, 43 gradients and 4 buffers are those of a plain loop" in out
    assert "bit for bit" in out
    assert "zb_h1, predicted in ms" in out
    assert "zb_h1, measured in ms" in out
    names = ["demo.svg", "gpt.safetensors", "sample.txt"]
    assert err.splitlines() == [f"wrote {folder / name}" for name in names]
    titles = re.findall(r'class="title"[^>]*>([^<]*)', (folder / "demo.svg").read_text())
    assert titles == ["zb_h1, predicted in ms", "zb_h1, measured in ms"]
    sample = (folder / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample in out


def test_help_shows_an_example_and_lists_every_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("draw", "simulate"):
        _, out, _ = run(capsys, command, "--help")
        assert f"stageline {command}" in out
        assert all(name in out for name in schedule_names())
