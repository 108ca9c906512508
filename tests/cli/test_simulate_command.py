"""`stageline simulate`: schedules compared for given costs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from tests.cli.invoke import invoke

import stageline
from stageline.cli.app import BAD_INPUT
from stageline.errors import CostsError
from stageline.report.summary import number
from stageline.schedules.build import schedule_names
from stageline.schedules.check import check
from stageline.schedules.families.registry import FAMILIES
from stageline.schedules.schedule import Schedule


def test_simulate_prints_measures_and_saves_pictures_and_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("v.svg", "v.html", "v.json", "v.csv")]
    saves = [argument for path in files for argument in ("--save", str(path))]
    times = ["--forward", "1.1", "--weight-grad", "0.6", "--transfer", "0.05"]
    code, out, err = invoke(capsys, "simulate", "zbv", "-p", "8", "-m", "24", *times, *saves)
    assert code == 0
    assert "span bubble" in out
    assert err.splitlines() == [f"wrote {path}" for path in files]
    assert ElementTree.parse(files[0]).getroot().tag.endswith("svg")
    assert "<svg" in files[1].read_text()
    assert json.loads(files[2].read_text())["traceEvents"]
    schedule = Schedule.from_csv(files[3])
    check(schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (8, 24)


def test_all_compares_every_synchronous_schedule_on_the_same_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = invoke(capsys, "simulate", "all", "-p", "4", "-m", "8")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert code == 0
    assert set(rows) == {"schedule", *schedule_names(synchronous=True)}
    # with a rank's share of the model fixed, more chunks mean less bubble, not more work
    assert float(rows["interleaved_1f1b"][0]) < float(rows["1f1b"][0])
    assert float(rows["zbv"][0]) < float(rows["zb_h1"][0])


def test_all_includes_asynchronous_schedules_if_num_minibatches_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = invoke(capsys, "simulate", "all", "-p", "4", "-m", "8", "--num-minibatches", "6")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert code == 0
    assert set(rows) == {"schedule", *schedule_names()}
    work = 6 * 8 * 3
    assert float(rows["1f1b"][0]) == work + 6 * 9  # a bubble of p - 1 micro-batches each
    assert float(rows["pipedream"][0]) == float(rows["pipedream_2bw"][0]) == work + 9


def test_schedules_are_compared_on_the_same_number_of_mini_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = invoke(capsys, "simulate", "1f1b", "pipedream", "-p", "4", "-m", "4")
    header, flushed, streamed = out.splitlines()
    assert header.endswith("fill to drain busy")
    assert flushed.split()[:2] == ["1f1b", str(8 * 21)]
    assert streamed.split()[:2] == ["pipedream", str(8 * 12 + 9)]
    assert streamed.endswith("100.0 %")


def test_a_schedule_that_cannot_be_built_is_listed_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = invoke(capsys, "simulate", "1f1b", "dualpipe_v", "-p", "4", "-m", "6")
    assert code == 0
    assert out.splitlines()[-1].startswith("1f1b ")
    assert err.startswith("dualpipe_v: num_microbatches is 6, but 'dualpipe_v' on 4 ranks")


def test_a_costs_file_can_give_costs_per_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 3], "links": {"latency": 0.5}, "transfer": 0}')
    _, out, _ = invoke(capsys, "simulate", "gpipe", "-p", "2", "-m", "1", "--costs", str(path))
    assert out.splitlines()[1].split()[:2] == ["gpipe", "9"]  # 1 + 3 + 2 + 2 and two latencies


def test_a_number_in_a_costs_file_is_for_a_whole_rank_as_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": 1.5}')
    outputs = [
        invoke(capsys, "simulate", "1f1b", "interleaved_1f1b", *costs)[1]
        for costs in (["--costs", str(path)], ["--forward", "1.5"])
    ]
    assert outputs[0] == outputs[1]


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
def test_an_invalid_costs_file_is_an_error_with_the_reason(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    code, _, err = invoke(capsys, "draw", "1f1b", "--costs", str(path))
    assert code == BAD_INPUT
    assert message in err


NUMBERS = {"forward": 1.3, "input_grad": 0.9, "weight_grad": 0.6, "transfer": 0.05}


@pytest.mark.parametrize("name", schedule_names())
def test_the_command_line_and_python_give_the_same_schedule_for_the_same_costs(
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
        code, out, _ = invoke(capsys, "simulate", name, *words)
        costs = stageline.Costs.of_a_rank(chunks, **given)
        schedule = stageline.build_schedule(name, **sizes, costs=costs if given else None)
        timeline = stageline.simulate(schedule, costs)
        assert code == 0
        assert Schedule.from_csv(csv) == schedule
        assert out.splitlines()[1].split()[1] == number(timeline.makespan)


def test_costs_of_the_wrong_length_are_an_error_for_every_schedule() -> None:
    for name in schedule_names():
        with pytest.raises(CostsError, match="forward has 5 values, but the schedule has"):
            stageline.build_schedule(
                name, num_ranks=3, num_microbatches=6, costs=stageline.Costs(forward=[1] * 5)
            )


def test_the_table_is_printed_even_if_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.svg"
    target.symlink_to(tmp_path / "missing" / "x.svg")
    code, out, err = invoke(capsys, "simulate", "1f1b", "--save", str(target))
    assert code == BAD_INPUT
    assert out.startswith("schedule")
    assert "x.svg' cannot be written: No such file or directory" in err
