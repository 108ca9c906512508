"""The layout of the source: the order of imports, where torch is used, public names and sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import stageline

SOURCE = Path(stageline.__file__).parent
PACKAGES = [  # in the order of imports
    *("errors", "arguments", "units", "limits", "files", "costs", "options", "schedules"),
    *("deprecated", "report", "simulation", "runs"),
    *(
        "torch_private",
        "torch_private_training",
        "model",
        "runtime",
        "planning",
        "pipeline_setup",
        "pipeline",
        "torchgpipe",
        "checkpoint",
        "training",
        "integrations",
    ),
    *("zoo", "studio", "cli", "__main__"),
]
TORCH_FREE = [
    *("errors", "arguments", "units", "limits", "files", "costs", "schedules", "report"),
    *("simulation", "runs"),
]
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = [path for path in FILES if path != SOURCE / "__init__.py"]
MAX_FILE, MAX_PIPELINE, MAX_FUNCTION, MAX_FOLDER = 350, 299, 50, 14  # lines, and files


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_imports_are_absolute() -> None:
    assert [p for p in FILES if any(name.startswith(".") for name in imported(p))] == []


def test_a_package_imports_only_from_those_above_it() -> None:
    found = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in MODULES
        for name in imported(path)
        if name.startswith("stageline.")
        and PACKAGES.index(name.split(".")[1]) > PACKAGES.index(package_of(path))
    ]
    assert found == []


def test_schedules_simulation_and_report_import_no_torch() -> None:
    found = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in MODULES
        for name in imported(path)
        if package_of(path) in TORCH_FREE and name.split(".")[0] in ("torch", "numpy")
    ]
    assert found == []


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    limits = dict.fromkeys(lengths, MAX_FILE) | {"pipeline.py": MAX_PIPELINE}
    assert {name: size for name, size in lengths.items() if size > limits[name]} == {}


def test_no_function_is_long() -> None:
    sizes = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                sizes[f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"] = size
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION} == {}


def test_no_folder_has_many_files() -> None:
    """Schedules have a file a family, however many there are."""
    counts = Counter(str(path.parent.relative_to(SOURCE)) for path in FILES)
    del counts["schedules/families"]
    assert {name: count for name, count in counts.items() if count > MAX_FOLDER} == {}


def test_a_class_name_has_one_meaning() -> None:
    """Models of the zoo may have layers of the same name."""
    counts = Counter(
        node.name
        for path in FILES
        if package_of(path) != "zoo"
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in counts.items() if count > 1] == []


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
        "Uncut",
        "build_schedule",
        "check",
        "estimate",
        "explain",
        "export",
        "fit",
        "latest",
        "load",
        "load_pretrained",
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


def test_each_worker_of_the_tests_is_launched() -> None:
    """Two of them were not for a while, so what they check was not checked."""
    workers = TESTS / "distributed" / "workers"
    launching = [*TESTS.rglob("*.py"), *(TESTS.parent / "benchmarks").rglob("*.py")]
    text = "".join(path.read_text() for path in launching if path.parent != workers)
    names = sorted(path.stem for path in workers.glob("*.py") if path.stem != "__init__")
    assert [
        name for name in names if f'"{name}"' not in text and f"workers.{name}" not in text
    ] == []
