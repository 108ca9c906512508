"""Files that are damaged, missing or no files give an error that names them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stageline as sl
from stageline.cli.options import ScheduleRequest
from stageline.costs import read_costs
from stageline.errors import CostsError, PlanError, ScheduleError
from stageline.files import read_bytes, read_json, read_text, write_text
from stageline.planning.partition.pipedream_graph import parse_graph, read_graph
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    TiedParameter,
    ValueCost,
)
from stageline.schedules import csv

READERS: dict[str, Callable[[Any], object]] = {
    "schedule": sl.Schedule.from_csv,
    "costs": lambda path: read_costs(Path(path)),
    "profile": sl.Profile.load,
    "cluster": sl.Cluster.load,
    "plan": sl.Plan.load,
    "graph": read_graph,
}
LAYER = LayerCost(1e-3, 1e-3, 1e-3, 100, 100, 40, 0)
VALUES = (ValueCost(-1, (0,), 8), ValueCost(0, (1,), 16))
PROFILE = Profile(
    ("a", "b"), (Measurement(1, (LAYER, LAYER), VALUES),), (TiedParameter((0, 1), 40),)
)

every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@every_reader
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        bytes(range(256)),
        "0F0,0B0\n".encode("utf-16"),
        '{"forward": 1}'.encode("utf-32"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5_000,
        b'{"num_devices": ' + b"9" * 5_000 + b"}",
        b'{"forward": 1e999, "forward": NaN}',
        b"null",
        b'"\\ud800"',
        b'"' * 1_000,
        b",\n" * 20_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_damaged_file_is_an_error(
    read: Callable[[Any], object], content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    if read is READERS["costs"] and content.startswith(b'{"forward"'):
        found: Any = read(path)  # its numbers are refused where costs are made of them
        with pytest.raises(CostsError):
            sl.Costs(**found)
        return
    with pytest.raises(sl.StagelineError) as caught:
        read(path)
    assert len(str(caught.value)) < 2_000


@every_reader
def test_a_path_that_cannot_be_read_is_an_error(
    read: Callable[[Any], object], tmp_path: Path
) -> None:
    (tmp_path / "pipe").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, words in {
        "missing": "cannot be read: No such file",
        ".": "is a folder, but has to be a file",
        "missing/x": "cannot be read",
        "pipe": "is not a regular file",
        "circle": "cannot be read: Too many levels",
        "x" * 5_000: "cannot be read: File name too long",
    }.items():
        with pytest.raises(sl.StagelineError, match=words):
            read(tmp_path / name)
    with pytest.raises(sl.StagelineError, match="is not a regular file"):
        read(Path("/dev/zero"))
    with pytest.raises(sl.StagelineError, match="but has to name a file"):
        read(Path("a\0b"))


def test_a_file_that_is_too_large_is_not_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(PlanError, match="has more than 16MiB"):
        read_bytes(path, PlanError)
    with pytest.raises(ScheduleError, match="has more than 128MiB"):
        sl.Schedule.from_csv(path)


def test_a_shell_pipe_can_be_read(tmp_path: Path) -> None:
    """As in `--costs <(command)`."""
    reading, writing = os.pipe()
    os.write(writing, b'{"forward": 2}')
    os.close(writing)
    try:
        assert read_json(f"/dev/fd/{reading}", CostsError) == {"forward": 2}
    finally:
        os.close(reading)
    write_text(tmp_path / "x", "é", CostsError)
    assert read_text(tmp_path / "x", CostsError) == "é"


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    schedule = sl.build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    for target in (tmp_path, tmp_path / "missing" / "x.csv"):
        with pytest.raises(ScheduleError, match="cannot be written"):
            schedule.to_csv(target)
        with pytest.raises(ScheduleError, match="cannot be written"):
            sl.lower(schedule).to_csv(target)
        with pytest.raises(PlanError, match="cannot be written"):
            PROFILE.save(target)
    with pytest.raises(sl.ReportError, match="cannot be written"):
        sl.simulate(schedule).save(tmp_path / "missing" / "x.svg")


def test_numbers_that_python_does_not_read_are_not_json(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": ' + "9" * 5_000 + "}")
    with pytest.raises(CostsError, match=r"costs\.json' is not JSON: .*4300"):
        read_json(path, CostsError)
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CostsError, match="nested too deeply"):
        read_json(path, CostsError)


PLAN = sl.plan(PROFILE, sl.Cluster(2, "1GiB"), batch_size=8, num_ranks=2, schedules=["1f1b"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"costs": {"speed": [1.0, 1.0]}},
            "costs has the field 'speed', but the fields are forward",
        ),
        ({"costs": {"forward": [1.0]}}, "forward has 1 values, but the schedule has 2 stages"),
        ({"costs": {"forward": [1e308, 1.0]}}, "0, or from 1e-60 to 1e"),
        (
            {"balance": [1, 1, 1]},
            "number of stages in balance is 3, but the plan's actions have 2: make a new plan",
        ),
        ({"balance": [2, 1]}, "balance adds up to 3, but the plan has 2 layers"),
        (
            {"recompute": [True]},
            "number of stages in recompute is 1, but the plan's actions have 2",
        ),
        (
            {"peak_memory": [1.0]},
            "number of ranks in peak_memory is 1, but the plan's actions have 2",
        ),
        ({"actions": ["0F0 0B0", "1F0"]}, "1I0 is missing, and so is 1B0"),
        ({"actions": ["0F0 0X0"]}, "an action looks like 2F0"),
        ({"actions": []}, "no row has a forward"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"chosen": {"schedule": "zbw"}}, "schedule 'zbw' is not known: did you mean 'zbv'"),
        ({"chosen": {"num_ranks": 3}}, "num_ranks is 3, but the plan's actions have 2"),
        (
            {"chosen": {"num_microbatches": 99}},
            "num_microbatches is 99, but the plan's actions have 8",
        ),
        ({"chosen": {"seconds": "fast"}}, "chosen.seconds: input should be a number"),
    ],
)
def test_loading_an_inconsistent_plan_is_an_error(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    values = json.loads(path.read_text())
    for key, value in change.items():
        values[key] = values[key] | value if key == "chosen" else value
    path.write_text(json.dumps(values))
    with pytest.raises(PlanError) as caught:
        sl.Plan.load(path)
    assert message in str(caught.value)
    assert "plan.json" in str(caught.value)


def test_a_plan_whose_steps_take_no_time_can_be_printed() -> None:
    free = LayerCost(0.0, 0.0, 0.0, 0, 0, 0, 0)
    profile = Profile(("a", "b"), (Measurement(1, (free, free), ()),))
    found = sl.plan(profile, sl.Cluster(2, "1GiB"), batch_size=4, schedules=["1f1b", "gpipe"])
    assert "–" in str(found)
    assert found.throughput == float("inf")


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            {"tied": (TiedParameter((0, 7), 40),)},
            "a tied weight has layers (0, 7), but layers are numbered from 0",
        ),
        ({"names": ()}, "has no layers"),
        (
            {
                "measurements": (
                    Measurement(1, (LAYER, LAYER), VALUES),
                    Measurement(2, (LAYER, LAYER), VALUES[:1]),
                )
            },
            "the values of 2 samples differ from those of 1",
        ),
        (
            {"measurements": (Measurement(1, (LAYER, LAYER), (ValueCost(0, (1,), 8, 0, (5,)),)),)},
            "let_go of a value of layer 0 is (5,)",
        ),
    ],
)
def test_an_inconsistent_profile_is_an_error(profile: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"names": ("a", "b"), "measurements": PROFILE.measurements}
    with pytest.raises(PlanError) as caught:
        Profile(**usual | profile)
    assert message in str(caught.value)


def test_long_lines_of_a_graph_are_read_in_linear_time() -> None:
    for line in ("a=[" * 3_000, "x" * 9_999, "y" * 10_001, "1" * 5_000 + " -- A -- "):
        with pytest.raises(PlanError):
            parse_graph(line)
    costs = "forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1"
    names = ["node" + "9" * 5_000, "node2", "node10", "other"]
    graph = parse_graph("\n".join(f"{name} -- Linear -- {costs}" for name in names))
    assert [layer.name for layer in graph.layers] == ["other", "node2", "node10", names[0]]


# --- properties: files with arbitrary contents -------------------------------------------------

quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
cells = st.from_regex(r"\d{1,7}[A-Z_]{1,6}\d{0,7}(>\d{1,3})?(@\d{1,3})?", fullmatch=True)
tables = st.lists(st.lists(cells | st.sampled_from(["0F0", "0B0", "1F0", "1B0", ""]), max_size=6))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@quick
@given(rows=tables)
def test_any_table_of_actions_is_a_schedule_or_an_error(rows: list[list[str]]) -> None:
    with suppress(ScheduleError):
        schedule = sl.Schedule.from_text(*(" ".join(row) for row in rows))
        sl.check(schedule)
        assert sl.simulate(schedule).makespan > 0


@quick
@given(text=st.text())
def test_any_text_is_csv_or_an_error(text: str) -> None:
    with suppress(ScheduleError):
        csv.parse(text)


@quick
@given(kind=st.sampled_from(sorted(READERS)), content=st.binary())
def test_any_bytes_are_read_or_an_error(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with suppress(sl.StagelineError):
        READERS[kind](path)


@quick
@given(
    name=st.sampled_from(["costs", "chosen", "actions", "balance", "others", "peak_memory"]),
    value=values,
)
def test_any_value_in_a_plan_is_read_or_an_error(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with suppress(sl.StagelineError):
        assert str(sl.Plan.load(path).timeline)


@quick
@given(value=st.dictionaries(st.sampled_from(["forward", "links", "message", "retained"]), values))
def test_any_value_in_a_costs_file_is_used_or_an_error(
    value: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(value))
    request = ScheduleRequest(2, 2)
    with suppress(sl.StagelineError):
        timeline = replace(request, costs=read_costs(path)).run("1f1b")[1]
        assert str(timeline)
