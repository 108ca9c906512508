"""A run is read from its folder at any time; a folder that holds anything else does no harm."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from tests.runs.folders import line, timeline, write_run

import stageline as sl
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runs.breakdown import rank_times
from stageline.runs.read import list_runs, read_run
from stageline.runs.records import LONGEST_TEXT


def test_run_has_what_its_files_say(tmp_path: Path) -> None:
    measured = timeline(2, 4, forward=1.0, input_grad=1.0, weight_grad=1.0)
    (tmp_path / "run" / "step-00000100").mkdir(parents=True)
    (tmp_path / "run" / "step-00000100").rename(tmp_path / "step-00000100")
    (tmp_path / "run").rmdir()
    folder = write_run(tmp_path / "run", measured)
    (tmp_path / "step-00000100").rename(folder / "step-00000100")
    run = read_run(folder)
    assert (run.name, run.status, run.step, run.checkpoints) == ("run", "finished", 100, (100,))
    assert [each.step for each in run.metrics] == list(range(10, 101, 10))
    assert run.configuration.schedule == "1f1b"
    assert run.measured[-1].spans == measured.spans
    assert run.notes == ()


def test_breakdown_of_a_rank_adds_up_to_its_step(tmp_path: Path) -> None:
    measured = timeline(2, 4, forward=1.0, input_grad=1.0, weight_grad=1.0)
    run = read_run(write_run(tmp_path / "run", measured))
    assert run.breakdown[1].parts == pytest.approx(
        {"forward": 4, "backward": 8, "bubble": 3, "optimizer": 2, "data": 1}
    )
    assert [time.total for time in run.breakdown] == pytest.approx([18, 18])


def test_recomputation_is_told_from_the_backward_that_follows() -> None:
    forward, backward = sl.Schedule.from_text("0F0 0B0").actions[0]
    row = (Span(forward, 0, 1), Span(backward, 1, 3), Span(backward, 3, 7))
    (time,) = rank_times(Timeline((row,), (0,)), None)
    assert time.parts == {"forward": 1, "recomputation": 2, "backward": 4}


def test_run_that_has_just_started_can_be_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", events=(("started", 0, ""),))
    for name in ("timeline.json", "metrics.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.status, run.step, run.metrics, run.measured, run.breakdown) == (
        "unfinished", 0, (), (), ()
    )  # fmt: skip


def test_last_line_that_is_still_being_written_is_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "loss": 1')
    run = read_run(folder)
    assert run.step == 100
    assert run.notes == ()


def test_loss_that_is_not_finite_is_none(tmp_path: Path) -> None:
    lines = [line(10), line(20, loss=float("nan")), line(30, loss=float("inf"))]
    run = read_run(write_run(tmp_path / "run", lines=lines))
    assert [each.loss for each in run.metrics] == [0.2, None, None]


def test_curve_of_a_long_run_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    lines = [line(step) for step in range(1, 16_001)]  # 5 MB
    run = read_run(write_run(tmp_path / "run", lines=lines))
    steps = [each.step for each in run.metrics]
    assert len(steps) <= 2000
    assert (steps[0], steps[-1]) == (1, 16_000)
    assert max(after - before for before, after in pairwise(steps)) < 60


@pytest.mark.parametrize(
    ("name", "contents", "note"),
    [
        ("run.json", "[" * 100_000, "run.json was not read: invalid json: recursion limit"),
        ("run.json", '{"started": "now"}', "run.json was not read: started: input should be"),
        ("run.json", '{"started": NaN}', "run.json was not read: started: input should be"),
        ("run.json", '{"started": true}', "run.json was not read: started: input should be"),
        ("run.json", '{"started": 1, "configuration": 3}', "run.json was not read: configuration:"),
        ("run.json", "", "run.json was not read: invalid json: eof"),
        ("run.json", "\0" * 1000, "run.json was not read: invalid json: expected value"),
        ("timeline.json", '{"steps": [{}]}', "timeline.json was not read: steps.0.step: field"),
        ("timeline.json", '{"steps": 7}', "timeline.json was not read: steps: input should be"),
        ("timeline.json", " " * (17 * 2**20), "timeline.json has more than 16MiB"),
        ("metrics.jsonl", '{"step": -1}\n', "1 line of metrics.jsonl could not be read: step:"),
        ("metrics.jsonl", "{}\n[]\n\x1b[2J\n", "3 lines of metrics.jsonl could not be read"),
        ("metrics.jsonl", '{"step": 1e400}\n', "1 line of metrics.jsonl could not be read: step"),
        ("events.jsonl", '{"time": 1, "kind": 1}\n', "1 line of events.jsonl could not be read"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_a_note(
    name: str, contents: str, note: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(contents)
    (found,) = read_run(folder).notes
    assert found.startswith(note)
    assert len(list_runs(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"actions": ["0F0", "1F0"]}, "has not one time for each action"),
        ({"actions": ["0F0 0F1 0F2"]}, "it has [1, 2] ranks"),
        ({"actions": ["rm -rf", "1F0"]}, "row 0, column 0 is 'rm'"),
        ({"placement": [0]}, "1F0 is out of range"),
        ({"replicas": [1_000_000_000, 1]}, "replicas"),
        ({"placement": [0, 700]}, "rank"),
        ({"starts": [[9.0] * 8, [0.0] * 8]}, "times of rank 0 are not in order"),
        ({"balance": [1, 2, 3]}, "balance and placement differ"),
        ({"idle": [[0, 0, 0, 0]]}, "ranks"),
    ],
)
def test_timeline_that_contradicts_itself_is_left_out(
    change: dict[str, object], note: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "timeline.json"
    contents = json.loads(path.read_text())
    contents["steps"][0] |= change
    path.write_text(json.dumps(contents))
    run = read_run(folder)
    assert run.measured == ()
    assert note in run.notes[0]


def test_text_of_a_file_is_on_one_line_and_short(tmp_path: Path) -> None:
    message = "\x1b[2J<script>alert(1)</script>\n" + "x" * 100_000
    folder = write_run(tmp_path / "run", events=(("started", 0, ""), ("failed", 3, message)))
    run = read_run(folder)
    (error,) = run.errors
    assert error.message.startswith("[2J<script>alert(1)</script> xxx")
    assert len(error.message) == LONGEST_TEXT
    assert run.status == "failed"


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "timeline.json", "events.jsonl"])
def test_files_elsewhere_are_not_read_through_links(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    assert read_run(folder).notes == (f"{name} was not read: is a link",)


def test_huge_file_without_lines_is_not_searched_for_long(tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(3 * 2**30)
    before = bytes_read()
    assert read_run(tmp_path).metrics == ()
    assert bytes_read() - before < 64 * 2**20


def test_pipes_and_folders_in_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    notes = read_run(folder).notes
    assert notes == (
        "metrics.jsonl was not read: it is not a regular file",
        "events.jsonl was not read: it is not a regular file",
    )


def test_list_has_the_latest_run_first_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number, name in enumerate(("old", "new <b>")):
        folder = write_run(runs / name, lines=[line(10 + number)])
        for path in folder.iterdir():
            os.utime(path, (1e9 + number, 1e9 + number))
    write_run(tmp_path / "elsewhere")
    (runs / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (runs / "circle").symlink_to(runs / "circle")
    (runs / "notes.txt").write_text("not a run")
    (runs / "empty").mkdir()
    found = list_runs(runs)
    assert [(run.name, run.step, run.status) for run in found] == [
        ("new <b>", 11, "finished"),
        ("old", 10, "finished"),
    ]


def test_folder_of_a_run_is_itself_a_list_of_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert [run.name for run in list_runs(folder)] == ["run"]


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_folder_that_is_no_run_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(sl.ReportError, match=r"is not a folder|is not the folder of a run"):
        read_run(tmp_path / name)
