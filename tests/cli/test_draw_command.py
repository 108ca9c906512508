"""`stageline draw`: schedules as grids."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.invoke import invoke

from stageline.cli.app import BAD_INPUT
from stageline.schedules.check import check
from stageline.schedules.schedule import Schedule


def test_draw_prints_the_grid_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "draw", "1f1b", "--num-ranks", "2", "--num-microbatches", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == ["rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1", "rank 1 │ .. F0 B0 B0 F1 B1 B1"]
    assert "makespan 9" in lines[-1]
    assert "step bubble 33.3 %" in lines[-1]
    assert "peak activations 2" in lines[-1]


def test_draw_takes_a_csv_file_instead_of_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1").to_csv(path)
    _, out, _ = invoke(capsys, "draw", str(path))
    assert out.splitlines()[0] == "rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1"
    assert "mine, 2 ranks" in out


def test_draw_marks_weight_versions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = invoke(
        capsys, "draw", "pipedream", "-p", "2", "-m", "1", "--num-minibatches", "3"
    )
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == [
        "rank 0 │ F0⁰ F1⁰ ... ... B0⁰ B0⁰ F2¹ B1⁰ B1⁰ ... B2¹ B2¹",
        "rank 1 │ ... F0⁰ B0⁰ B0⁰ F1¹ B1¹ B1¹ F2² B2² B2²",
    ]
    assert lines[-1].startswith("pipedream, 2 ranks, 3 mini-batches of 1 micro-batch · makespan 12")


def test_asynchronous_schedules_run_several_mini_batches_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = invoke(capsys, "draw", "pipedream_2bw", "-p", "4", "-m", "4")
    assert "pipedream_2bw, 4 ranks, 4 mini-batches of 4 micro-batches" in out


def test_a_synchronous_schedule_can_run_mini_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = invoke(capsys, "draw", "gpipe", "-p", "2", "-m", "2", "--num-minibatches", "2")
    assert "gpipe, 2 ranks, 2 mini-batches of 2 micro-batches" in out
    assert "F2¹" in out


def test_vertical_sync_uses_one_version_on_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-p", "3", "-m", "1", "--num-minibatches", "5"]
    _, out, _ = invoke(capsys, "draw", "pipedream", *sizes, "--vertical-sync")
    assert set(re.findall(r"F4[⁰¹²³⁴]", out)) == {"F4²"}
    _, out, _ = invoke(capsys, "draw", "pipedream", *sizes)
    assert set(re.findall(r"F4[⁰¹²³⁴]", out)) == {"F4²", "F4³", "F4⁴"}


def test_a_schedule_with_replicas_survives_a_csv_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vgg.csv"
    arguments = ["-p", "4", "-m", "3", "--replicas", "3,1", "--save", str(path)]
    _, out, _ = invoke(capsys, "draw", "pipedream", *arguments)
    schedule = Schedule.from_csv(path)
    check(schedule)
    assert schedule.replicas == (3, 1)
    _, again, _ = invoke(capsys, "draw", str(path))
    assert again.splitlines()[:5] == out.splitlines()[:5]


def test_a_csv_file_with_a_stage_on_two_ranks_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "[red].csv"
    path.write_text("0F0,0B0\n1F0,1B0\n0F0,0B0\n")
    code, _, err = invoke(capsys, "draw", str(path))
    assert code == BAD_INPUT
    assert "rank 2 holds no stage" in err
