"""Files with values that make no sense: each is a note or an answer, and never another error."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.runs.folders import line, timeline, write_run

from stageline.runs.findings.findings import findings
from stageline.runs.pages.markdown import markdown
from stageline.runs.pages.page import run_page
from stageline.runs.read import list_runs, read_run
from stageline.runs.records import METRICS, RUN, TIMELINE, PlannedCosts

HOSTILE: list[Any] = [
    *(None, True, "", "x" * 10_000, "<script>", "\u202e\0\x1b[2J", [], {}, [[[]]], {"a": {}}),
    *(0, -1, 1, 2, 7, 10**9, 10**30, 0.0, -0.5, 1e-320, 1e-70, 1e12, 1e59, 1e308, 0.1),
    *(math.nan, math.inf, -math.inf),
]


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in JSON, containers included."""
    items: list[Any] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [place, *(leaf for key, each in items for leaf in leaves(each, (*place, key)))]


def damaged(value: Any, draw: Random) -> Any:
    """JSON with one to three values replaced."""
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(leaves(value)[1:])
        inner = value
        for key in path:
            inner = inner[key]
        inner[last] = deepcopy(draw.choice(HOSTILE))
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    times: tuple[float, ...] = (0.001, 0.002)
    costs = dict.fromkeys(("forward", "input_grad", "weight_grad"), times)
    plan = PlannedCosts("1f1b", 0.03, costs, (1.0, 1.0))
    measured = timeline(2, 4, forward=(1.0, 2.0))
    types: dict[str, Any] = {"layer_types": ("Block",) * 2, "options": {"seed": "1"}}
    place = tmp_path_factory.mktemp("runs") / "run"
    return write_run(place, measured, [line(10), line(20)], plan=plan, **types)


@pytest.mark.parametrize("name", [RUN, TIMELINE, METRICS])
def test_damaged_values_are_answered_or_noted(name: str, folder: Path) -> None:
    path, draw = folder / name, Random(name)
    whole = path.read_text()
    read = 0
    for number in range(60):
        *lines, last = whole.splitlines()
        path.write_text("\n".join([*lines, json.dumps(damaged(json.loads(last), draw)), ""]))
        run = read_run(folder)
        read += not run.notes
        assert all(finding.gain is None or finding.gain <= 100 for finding in findings(run))
        assert list_runs(folder)
        if number % 10 == 0:
            assert run_page(run).endswith("</html>\n")
            assert markdown([run, run])
    path.write_text(whole)
    assert 0 < read < 60
