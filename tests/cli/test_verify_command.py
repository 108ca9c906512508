"""`stageline verify`: pipelines of a user's model compared with a plain loop."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stageline.cli.app import app
from stageline.errors import ModelError
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(4)])
    return model, nn.functional.mse_loss, torch.randn(8, 4), torch.randn(8, 4)

class Counting(nn.Linear):
    calls = 0  # shared by all copies, so a plain loop and a pipeline differ

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x) * Counting.calls

def counting():
    return nn.Sequential(Counting(4, 4), nn.ReLU()), *build()[1:]

def three_values():
    return build()[:3]
"""


@pytest.fixture(autouse=True)
def folder(user_module: Callable[[str, str], Path]) -> Path:
    return user_module("users_model", MODEL)


def test_verify_compares_every_synchronous_schedule() -> None:
    result = CliRunner().invoke(app, ["verify", "users_model:build", "--backend", "serial"])
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert len(lines) == 14
    assert all(line.endswith("bit-identical") for line in lines)


def test_a_difference_is_named_and_gives_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["verify", "users_model:counting", "1f1b", "-m", "2"])
    assert result.exit_code == 1
    assert "differs" in result.output
    assert "0.weight (stage 0)" in result.output


def test_a_schedule_that_cannot_be_built_is_listed_with_the_reason() -> None:
    call = ["verify", "users_model:build", "1f1b", "dualpipe_v", "-p", "2", "-m", "3"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0
    assert "not possible  num_microbatches is 3, but 'dualpipe_v'" in result.output


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("users_model", "the model is 'users_model', but has to be module:function"),
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("users_model:nothing", "module 'users_model' has no function 'nothing'"),
        ("users_model:three_values", "the function returned 3 values, but has to return a"),
    ],
)
def test_an_argument_that_is_no_workload_is_an_error(reference: str, message: str) -> None:
    result = CliRunner().invoke(app, ["verify", reference])
    assert isinstance(result.exception, ModelError)
    assert message in str(result.exception)


BROKEN_MODULES = {
    "raises": ("raise ValueError('no weights\\nhere')", "ValueError was raised when raises was im"),
    "exits": ("raise SystemExit(3)", "SystemExit was raised when exits was imported: 3 ("),
    "typo": ("def build(: pass", "SyntaxError was raised when typo was imported: invalid syntax ("),
    "needy": ("import not_installed", "No module named 'not_installed' ("),
    "fails": (
        "def build(): return 1 / 0",
        "ZeroDivisionError was raised when fails:build was call",
    ),
    "empty": ("", "module 'empty' has no function 'build'"),
    "odd": (
        "def __getattr__(name): raise OSError('x')",
        "OSError was raised when odd was imported",
    ),
}


@pytest.mark.parametrize("name", BROKEN_MODULES)
def test_an_exception_of_the_users_module_is_one_line_with_its_location(
    name: str, folder: Path
) -> None:
    code, message = BROKEN_MODULES[name]
    (folder / f"{name}.py").write_text(code)
    for command in ("verify", "profile"):
        result = CliRunner().invoke(app, [command, f"{name}:build"])
        assert isinstance(result.exception, ModelError)
        assert message in str(result.exception)
        assert "\n" not in str(result.exception)
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "reference", ["../x:y", "/tmp/x.py:build", "a b:c", "..:x", "no.such.module:build", "x\0:y"]
)
def test_a_module_outside_of_this_folder_is_an_error(reference: str) -> None:
    result = CliRunner().invoke(app, ["verify", reference])
    assert isinstance(result.exception, ModelError)


def test_the_module_may_be_given_as_a_file() -> None:
    for reference in ("users_model.py:build", "./users_model.py:build"):
        words = ["verify", reference, "gpipe", "--backend", "serial"]
        assert CliRunner().invoke(app, words).exit_code == 0


def test_streams_are_checked_for_every_schedule() -> None:
    call = ["verify", "users_model:build", "1f1b", "zbv", "--streams"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    pattern = r"(1f1b|zbv) +bit-identical  streams: [\d,]+ accesses on 7 streams, all ordered"
    assert all(re.fullmatch(pattern, line) for line in result.output.splitlines())
    assert len(result.output.splitlines()) == 2


def test_an_access_without_an_order_is_reported_with_both_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CheckedAccelerator, "wait_event", lambda *_: None)
    result = CliRunner().invoke(app, ["verify", "users_model:build", "1f1b", "--streams"])
    assert result.exit_code == 1
    assert "1f1b               fails  rank 0 failed in layer" in result.output
    assert "StreamOrderError: memory is read on" in result.output
    assert "but nothing makes that wait until it was" in result.output
