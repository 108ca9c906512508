"""examples/check_devices.py: in threads, as two processes, and what it says of a broken device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from examples import check_devices
from examples.check_devices import Finding, Verdict, World, carried_out, merged
from rich.console import Console
from tests.distributed.launch import launch

import stageline as sl
from stageline.zoo import device_training
from stageline.zoo.device_training import Comparison, DeviceTraining
from stageline.zoo.plain import train_plainly

TITLES = [
    "Weights compared with those of a plain loop",
    "Weights compared with those of a plain loop, streams simulated and checked",
    "Messages between ranks",
    "Overlap of messages and work",
    "Steps of a larger model",
    "Waits of the host for a device",
    "Failure of a rank",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(report: Path) -> int:
    with pytest.raises(typer.Exit) as end:
        check_devices.main(quick=True, sanitizer=False, report=report)
    return end.value.exit_code


def verdicts(report: Path) -> dict[str, dict[str, str]]:
    """Return what a report says of each subject, by title."""
    checks = json.loads(report.read_text())["checks"]
    return {
        title: {each["subject"]: each["verdict"] for each in row} for title, row in checks.items()
    }


def assert_good(report: Path, output: str) -> None:
    found = verdicts(report)
    assert [*found] == TITLES
    assert found[TITLES[0]] == found[TITLES[1]] == {"zbv": "ok", "pipedream": "ok"}
    assert {name for row in found.values() for name in row.values()} == {"ok", "skipped"}
    for title in ("Environment", *TITLES):
        assert f"\n{title}\n" in output
    assert re.search(r"No check failed: \d+ ok, 1 skipped\.", output)
    assert f"The report to send back is {report}." in output.replace("\n", "")


def test_in_threads_it_reports_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    report = tmp_path / "report.json"
    assert run(report) == 0
    assert_good(report, capsys.readouterr().out)
    written = json.loads(report.read_text())
    assert written["environment"][0]["torch"] == torch.__version__
    assert written["environment"][0]["stageline"] == sl.__version__
    assert written["environment"][0]["ranks"]["0"]["kind"] == "thread"
    assert [*written["environment"][0]["ranks"]] == ["0", "1"]
    step = written["checks"]["Steps of a larger model"][0]["data"]
    assert 0.0 < step["ideal"] <= step["alone"]
    assert step["peak_memory"][0] > 2**20


def test_in_two_processes_the_first_reports_on_both(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ends = launch("checking_devices", 2, str(report))
    assert [ended.code for ended in ends] == [0, 0], ends
    assert_good(report, ends[0].output)
    assert ends[1].output == ""
    written = json.loads(report.read_text())
    assert [[*each["ranks"]] for each in written["environment"]] == [["0"], ["1"]]
    assert written["environment"][1]["ranks"]["1"]["kind"] == "process"
    (link,) = written["checks"]["Messages between ranks"]
    assert link["data"]["rank 0"] == link["data"]["rank 1"]  # both know what the first has measured
    failure = written["checks"]["Failure of a rank"][0]["data"]
    assert all("this layer fails on purpose" in failure[f"rank {r}"]["error"] for r in (0, 1))


@pytest.fixture
def world() -> World:
    return World(Console(quiet=True).status(""), quick=True)


@pytest.mark.parametrize(
    ("differences", "verdict", "text"),
    [
        ((0.0, 0.0), Verdict.OK, "same bits"),
        ((1e-6, 2e-6), Verdict.NOTE, "differs by 1.0e-06 from the plain loop, which differs by 2"),
        ((1e-6, 0.0), Verdict.FAILED, "which differs by 0.0e+00 from itself"),
        ((0.5, 2e-6), Verdict.FAILED, "differs by 5.0e-01"),
        ((float("nan"), 0.0), Verdict.FAILED, "differs by nan"),
    ],
)
def test_a_difference_is_rounding_only_if_the_plain_loop_differs_from_itself_too(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    differences: tuple[float, float],
    verdict: Verdict,
    text: str,
) -> None:
    monkeypatch.setattr(DeviceTraining, "compare", lambda *_: Comparison(*differences, [], []))
    found = [*check_devices.parity(world)]
    assert [each.subject for each in found] == ["zbv", "pipedream"]
    assert {each.verdict for each in found} == {verdict}
    assert text in found[0].text
    assert not torch.are_deterministic_algorithms_enabled()  # as before


def test_what_raises_is_reported_and_the_other_checks_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Mapping[str, Any]:
        raise RuntimeError("an illegal memory access\nwas encountered")

    monkeypatch.setattr(check_devices, "copy_link", broken)
    monkeypatch.setattr(check_devices, "parity", lambda *_, **__: iter(()))
    monkeypatch.setattr(check_devices, "steps", lambda _: iter(()))
    report = tmp_path / "report.json"
    assert run(report) == 1
    found = verdicts(report)
    assert [*found] == TITLES
    assert found["Messages between ranks"] == {"stopped by an error": "failed"}
    assert found["Failure of a rank"] == {"a layer raises": "ok"}
    output = capsys.readouterr().out
    assert "Something is wrong here: 1 failed, 2 ok, 1 skipped." in output
    assert "RuntimeError: an illegal memory access" in output
    assert "Traceback" in report.read_text()


def test_the_worst_of_all_processes_counts() -> None:
    good, bad = (
        Finding(Verdict.OK, "1f1b", "fine"),
        Finding(Verdict.FAILED, "1f1b", "bad", {"n": 1}),
    )
    (found,) = merged([[good], [bad], [good]])
    assert (found.verdict, found.text) == (Verdict.FAILED, "rank 1: bad")
    assert found.data == {"rank 0": {}, "rank 1": {"n": 1}, "rank 2": {}}
    assert merged([[good], [good]])[0].text == "fine"


def test_the_sanitizer_of_torch_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="needs CUDA, and processes"):
        check_devices.main(quick=True, sanitizer=True, report=tmp_path / "report.json")


def test_a_check_that_raises_keeps_what_it_has_found(world: World) -> None:
    def check(_: World) -> Iterator[Finding]:
        yield Finding(Verdict.OK, "first", "fine")
        raise ValueError

    found = carried_out(world, check)
    assert [(each.subject, each.verdict) for each in found] == [
        ("first", Verdict.OK),
        ("stopped by an error", Verdict.FAILED),
    ]


def test_a_pipeline_with_other_numbers_differs_from_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    def with_another_seed(*args: Any, seed: int, **options: Any) -> list[float]:
        return train_plainly(*args, seed=seed + 1, **options)

    monkeypatch.setattr(device_training, "train_plainly", with_another_seed)
    found = world.training.compare(check_devices.TINY, "1f1b")
    assert found.difference > check_devices.ROUNDING
    assert found.of_itself == 0.0
