"""The plan of the house: imports point up, torch stays out, the public names are those listed."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stageline

SOURCE = Path(stageline.__file__).parent
ROOMS = [
    *("errors", "arguments", "units", "limits", "files", "costs", "options", "schedules"),
    *("deprecated", "report", "simulation"),
    *(
        "torch_private",
        "model",
        "runtime",
        "planning",
        "pipeline_setup",
        "pipeline",
        "checkpoint",
        "training",
    ),
    *("zoo", "cli", "__main__"),
]
TORCH_FREE = [
    *("errors", "arguments", "units", "limits", "files", "costs", "schedules", "report"),
    "simulation",
]
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name their room"
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_those_above_it(path: Path) -> None:
    allowed = ROOMS[: ROOMS.index(room_of(path)) + 1]
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("stageline.")}
    assert rooms <= set(allowed)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_schedules_and_their_pictures_import_no_torch(path: Path) -> None:
    if room_of(path) in TORCH_FREE:
        assert not {"torch", "numpy"} & {name.split(".")[0] for name in imported(path)}


def test_the_public_names_are_those_of_the_design() -> None:
    assert sorted(stageline.__all__) == [
        "Action",
        "BatchError",
        "CheckpointError",
        "Cluster",
        "Costs",
        "CostsError",
        "Device",
        "Kind",
        "Layer",
        "LayerSequence",
        "Level",
        "Link",
        "ModelError",
        "Options",
        "ParityError",
        "Pipeline",
        "Plan",
        "PlanError",
        "Profile",
        "Program",
        "ReportError",
        "Schedule",
        "ScheduleError",
        "StageError",
        "StagelineError",
        "StepResult",
        "Timeline",
        "build_schedule",
        "check",
        "estimate",
        "explain",
        "export",
        "fit",
        "latest",
        "load",
        "lower",
        "measure_links",
        "measure_rates",
        "plan",
        "profile",
        "save",
        "schedule_names",
        "search_schedule",
        "simulate",
    ]
    assert all(hasattr(stageline, name) for name in stageline.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Pipelin'"):
        stageline.Pipelin  # noqa: B018


def test_every_error_can_be_caught_as_stageline_error_and_as_value_error() -> None:
    for error in (stageline.ScheduleError, stageline.CostsError, stageline.ReportError):
        assert issubclass(error, stageline.StagelineError)
        assert issubclass(error, ValueError)


@pytest.mark.parametrize("command", [["draw", "1f1b"], ["simulate", "zbv", "zb_1p"]])
def test_draw_and_simulate_never_import_torch(command: list[str]) -> None:
    script = f"""
import sys
from stageline.cli import main
sys.argv = ["stageline", *{command!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.mark.alone
def test_draw_answers_in_under_six_tenths_of_a_second() -> None:
    command = [str(Path(sys.executable).parent / "stageline"), "draw", "1f1b"]

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.6
