"""The command line, as a person would use it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import stageline
from stageline import cli
from stageline.errors import CostsError
from stageline.report.summary import number
from stageline.schedules.build import schedule_names
from stageline.schedules.check import check
from stageline.schedules.families.table import FAMILIES
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
    assert set(rows) == {"schedule", *schedule_names(synchronous=True)}
    # with a rank's share of the model fixed, more chunks mean less bubble, not more work
    assert float(rows["interleaved_1f1b"][0]) < float(rows["1f1b"][0])
    assert float(rows["zbv"][0]) < float(rows["zb_h1"][0])


def test_with_a_number_of_mini_batches_all_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "all", "-p", "4", "-m", "8", "--minibatches", "6")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert code == 0
    assert set(rows) == {"schedule", *schedule_names()}
    work = 6 * 8 * 3
    assert float(rows["1f1b"][0]) == work + 6 * 9  # a bubble of p - 1 micro-batches each
    assert float(rows["pipedream"][0]) == float(rows["pipedream_2bw"][0]) == work + 9


def test_an_asynchronous_schedule_is_compared_with_others_on_as_many_mini_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "simulate", "1f1b", "pipedream", "-p", "4", "-m", "4")
    header, flushed, streamed = out.splitlines()
    assert header.endswith("fill to drain busy")
    assert flushed.split()[:2] == ["1f1b", str(8 * 21)]
    assert streamed.split()[:2] == ["pipedream", str(8 * 12 + 9)]
    assert streamed.endswith("100.0 %")


def test_draw_shows_a_stream_with_versions(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "draw", "pipedream", "-p", "2", "-m", "1", "--minibatches", "3")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == [
        "rank 0 │ F0⁰ F1⁰ ... ... B0⁰ B0⁰ F2¹ B1⁰ B1⁰ ... B2¹ B2¹",
        "rank 1 │ ... F0⁰ B0⁰ B0⁰ F1¹ B1¹ B1¹ F2² B2² B2²",
    ]
    assert lines[-1].startswith("pipedream, 2 ranks, 3 mini-batches of 1 micro-batch · makespan 12")


def test_asynchronous_schedules_have_several_mini_batches_unless_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "draw", "pipedream_2bw", "-p", "4", "-m", "4")
    assert "pipedream_2bw, 4 ranks, 4 mini-batches of 4 micro-batches" in out


def test_a_synchronous_schedule_is_streamed_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "draw", "gpipe", "-p", "2", "-m", "2", "--minibatches", "2")
    assert "gpipe, 2 ranks, 2 mini-batches of 2 micro-batches" in out
    assert "F2¹" in out


def test_vertical_sync_shows_one_version_on_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-p", "3", "-m", "1", "--minibatches", "5"]
    _, out, _ = run(capsys, "draw", "pipedream", *sizes, "--vertical-sync")
    assert set(re.findall(r"F4[⁰¹²³⁴]", out)) == {"F4²"}
    _, out, _ = run(capsys, "draw", "pipedream", *sizes)
    assert set(re.findall(r"F4[⁰¹²³⁴]", out)) == {"F4²", "F4³", "F4⁴"}


def test_replicas_are_drawn_saved_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vgg.csv"
    arguments = ["-p", "4", "-m", "3", "--replicas", "3,1", "--save", str(path)]
    _, out, _ = run(capsys, "draw", "pipedream", *arguments)
    schedule = Schedule.from_csv(path)
    check(schedule)
    assert schedule.replicas == (3, 1)
    _, again, _ = run(capsys, "draw", str(path))
    assert again.splitlines()[:5] == out.splitlines()[:5]


@pytest.mark.parametrize("arguments", [["verify", "no.such:model"], ["demo", "x", "--schedule"]])
def test_what_is_held_to_a_plain_loop_refuses_asynchronous_schedules(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments, "pipedream")
    assert code == cli.BAD_INPUT
    assert err.startswith("error: 'pipedream' is asynchronous: its weights change while")
    assert "use one of naive, gpipe, 1f1b" in err
    assert "2bw" not in err


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
        (["draw", "zb_1p", "--memory-limit", "tiny"], "'tiny' is no size in bytes"),
        (["draw", "zb_1p", "--memory-limit", "22GiB"], "an activation takes 1 bytes: give costs"),
        (["draw", "zb_1p", "--time-budget", "0"], "time_budget is 0.0, but has to be a number of"),
        (["draw", "1f1b", "--save", "nowhere/x.svg"], "use a file in a folder that exists"),
        (["simulate", "foo", "bar"], "none of the schedules can be built\nfoo: schedule 'foo'"),
        (["simulate", "1f1b", "gpipe", "-v", "3"], "chunks_per_rank was given, but none of 1f1b"),
        (["draw", "pipedream", "--replicas", "3,x"], "--replicas is '3,x', but has to be a number"),
        (["draw", "pipedream", "--replicas", "2,1"], "replicas is [2, 1], but must be one"),
        (
            ["draw", "gpipe", "--replicas", "2,2"],
            "replicas was given for 'gpipe'",
        ),
        (
            ["draw", "1f1b", "--vertical-sync"],
            "vertical_sync was given for '1f1b'",
        ),
        (["draw", "1f1b", "--minibatches", "0"], "num_minibatches is 0, but has to be a whole"),
        (["simulate", "1f1b", "gpipe", "--replicas", "2,2"], "replicas was given, but none of"),
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
        ('{"foward": 1}', "has 'foward', but costs are forward, input_grad"),
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


NUMBERS = {"forward": 1.3, "input_grad": 0.9, "weight_grad": 0.6, "transfer": 0.05}


@pytest.mark.parametrize("name", schedule_names())
def test_the_command_line_simulates_the_schedule_that_python_builds_for_the_same_costs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a number for a whole rank, and with a number for each stage."""
    sizes: dict[str, Any] = {"num_ranks": 3, "num_microbatches": 6}
    chunks = FAMILIES[name].chunks
    lists = {cost: [1.0 + 0.1 * stage for stage in range(3 * chunks)] for cost in NUMBERS}
    for given in (NUMBERS, lists, {}):
        (tmp_path / "costs.json").write_text(json.dumps(given))
        csv = str(tmp_path / "x.csv")
        words = ["-p", "3", "-m", "6", "--costs", str(tmp_path / "costs.json"), "--save", csv]
        code, out, _ = run(capsys, "simulate", name, *words)
        costs = stageline.Costs.of_a_rank(chunks, **given)
        schedule = stageline.build_schedule(name, **sizes, costs=costs if given else None)
        timeline = stageline.simulate(schedule, costs)
        assert code == 0
        assert Schedule.from_csv(csv) == schedule
        assert out.splitlines()[1].split()[1] == number(timeline.makespan)


def test_costs_of_the_wrong_length_are_refused_for_every_schedule() -> None:
    for name in schedule_names():
        with pytest.raises(CostsError, match="forward has 5 values, but the schedule has"):
            stageline.build_schedule(
                name, num_ranks=3, num_microbatches=6, costs=stageline.Costs(forward=[1] * 5)
            )


COMMAND = [sys.executable, "-m", "stageline"]


@pytest.mark.parametrize(
    "words", [["simulate", "1f1b", "-p", "200", "-m", "9"], ["draw", "gpipe", "-p", "99"]]
)
def test_what_is_to_be_saved_is_written_though_nobody_reads_what_is_printed(
    words: list[str], tmp_path: Path
) -> None:
    """As in `stageline simulate … --save x.html | head -3`, with a head that is gone at once."""
    files = [tmp_path / name for name in ("x.html", "x.svg", "x.json", "x.csv")]
    saves = [word for path in files for word in ("--save", str(path))]
    process = subprocess.Popen(
        [*COMMAND, *words, *saves], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert told.splitlines() == [f"wrote {path}" for path in files]
    assert all(path.stat().st_size > 1000 for path in files)


def test_output_that_is_closed_from_the_start_is_no_error(tmp_path: Path) -> None:
    line = f"{shlex.join(COMMAND)} draw 1f1b --save {tmp_path / 'x.svg'} >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path / 'x.svg'}\n")


def test_a_full_disk_is_told_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "draw", "1f1b"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_the_table_is_printed_even_if_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.svg"
    target.symlink_to(tmp_path / "missing" / "x.svg")
    code, out, err = run(capsys, "simulate", "1f1b", "--save", str(target))
    assert code == cli.BAD_INPUT
    assert out.startswith("schedule")
    assert "x.svg' cannot be written: No such file or directory" in err


def test_ctrl_c_ends_a_search_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stageline.cli.build_schedule", interrupt)
        assert run(capsys, "draw", "zb_1p") == (130, "", "interrupted\n")
