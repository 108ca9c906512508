"""The runs of experiments/images, at a size of seconds: parity, transfer, resumption, reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.images import parity, training
from experiments.images.__main__ import app
from experiments.images.data import load
from experiments.images.plan import FULL, QUICK
from experiments.images.recipe import Recipe
from experiments.images.summary import Accuracies, capacities, transfers
from experiments.images.training import Training
from experiments.results import Results
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}
TINY = Training("digits", "B", 3, 8, Recipe(steps=2, batch_size=8))


@pytest.mark.parametrize("cells", ["B", "D"])
def test_one_and_four_partitions_give_the_same_bits(cells: str, tmp_path: Path) -> None:
    found = parity.compare(replace(TINY, cells=cells), tmp_path)
    assert found["equal"] == found["tensors"] > 300
    assert found["weights"] == found["weights on 4"]


def test_a_single_bit_is_a_difference() -> None:
    one = {"a": torch.zeros(3), "b": torch.ones(3)}
    other = {"a": torch.zeros(3), "b": torch.ones(3).nextafter(torch.tensor(2.0))}
    assert parity.differing(one, other) == ["b"]
    assert training.digest(one) != training.digest(other)


def test_fine_tuning_begins_with_all_weights_of_the_source_but_its_heads(tmp_path: Path) -> None:
    weights = training.source_weights(replace(TINY, task="digits-6"), tmp_path)
    with training.new_pipeline(replace(TINY, task="digits-4")) as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        training.take_over(pipe, weights)
        after = pipe.state_dict()
    for name, value in after.items():
        is_head = name.startswith(("head.", "auxiliary."))
        assert torch.equal(value, (before if is_head else weights)[name]), name
    assert len(after["head.3.weight"]) == 4  # classes
    assert weights["stem.1.num_batches_tracked"] == 2


def test_accuracy_counts_the_logits_of_the_head_and_every_image(tmp_path: Path) -> None:
    images = load("digits")[1]
    few = images.at(torch.arange(130))
    with training.new_pipeline(TINY) as pipe:
        training.fit(TINY, pipe, tmp_path)
        found = training.accuracy(pipe, few, size=50)
        pipe.eval()
        with torch.no_grad():
            logits, auxiliary = pipe(few.pixels)
    assert found == int((logits.argmax(1) == few.labels).sum()) / 130
    assert not torch.equal(logits, auxiliary)


# Ends without warning in the third batch, as soon as one checkpoint is complete: saves go on in the
# background.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from experiments.images import batches
from experiments.images.__main__ import app

calls, original = [], batches.cut_out
folder = Path(sys.argv[sys.argv.index("--folder") + 1])

def cut_out(*arguments):
    calls.append(arguments)
    if len(calls) == 3:
        while not list(folder.glob("runs/*/step-????????")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)

batches.cut_out = cut_out
app()
"""


def invoke(folder: Path, name: str) -> str:
    done = CliRunner().invoke(app, ["--quick", "--folder", str(folder), name])
    assert done.exit_code == 0, done.output
    return done.output


def made(folder: Path) -> dict[str, Any]:
    """Return the runs in a folder without their times."""
    runs = json.loads((folder / "results.json").read_text())
    return {name: run | {"seconds": None} for name, run in runs.items()}


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on_to_the_same_result(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    arguments = [sys.executable, "-c", KILLED, "--quick", "--folder", str(folder), "train"]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # the bits depend on it
    environment = os.environ | PATHS | threads
    killed = subprocess.run(arguments, cwd=ROOT, env=environment, check=False, timeout=100)
    assert killed.returncode == -signal.SIGKILL
    assert not (folder / "results.json").exists()
    assert "resuming from step" in invoke(folder, "train")
    invoke(tmp_path / "undisturbed", "train")
    assert made(folder) == made(tmp_path / "undisturbed")
    assert len(made(folder)) == QUICK.num_seeds


@pytest.mark.slow
def test_transfer_ends_in_a_table_and_a_picture(tmp_path: Path) -> None:
    output = invoke(tmp_path, "transfer")
    assert "digits-6 →" in output
    assert "from scratch" in output
    assert (tmp_path / "transfer.svg").read_text().startswith("<?xml")
    runs = made(tmp_path)
    assert len(runs) == 1 + 2 * len(QUICK.shares) * QUICK.num_transfer_runs
    few, many = transfers(QUICK, runs)
    assert (few.images, many.images) == (4, 560)
    assert len(few.tuned.values) == len(many.scratch.values) == QUICK.num_transfer_runs
    assert invoke(tmp_path, "transfer").count("step ") == 0  # nothing is trained again


def test_runs_with_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    run = QUICK.trainings()[0]
    Results(tmp_path / "results.json").run_once(run.name, lambda: {"settings": "others"}, seed=0)
    done = CliRunner().invoke(app, ["--quick", "--folder", str(tmp_path), "train"])
    assert done.exit_code == 2
    assert "settings others" in done.output


def test_fashion_mnist_that_is_not_installed_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiments.images.__main__.has_fashion", lambda: False)
    done = CliRunner().invoke(app, ["--data", "fashion", "train"])
    assert done.exit_code == 2
    assert "dataset-fashion-mnist" in done.output


def test_the_readme_and_the_pictures_have_what_the_results_say(tmp_path: Path) -> None:
    """Report on the committed results, into another folder."""
    here = ROOT / "experiments" / "images"
    for name in ("results.json", "README.md"):
        (tmp_path / name).write_text((here / name).read_text())
    done = CliRunner().invoke(app, ["--folder", str(tmp_path), "report"])
    assert done.exit_code == 0, done.output
    for name in ("README.md", "capacity.svg", "transfer.svg"):
        assert (tmp_path / name).read_text() == (here / name).read_text(), name


def test_accuracies_have_the_deviation_of_a_sample() -> None:
    found = Accuracies((0.80, 0.82, 0.84))
    assert (round(found.mean, 9), round(found.spread, 9)) == (0.82, 0.02)
    assert Accuracies((0.5,)).spread == 0


def test_sizes_without_runs_are_left_out_of_the_table() -> None:
    first = FULL.capacity()[0]
    runs = {first.name: {"accuracy": 0.5, "parameters": 7}}
    assert [point.model for point in capacities(FULL, runs)] == ["B(3,8)"]
    assert capacities(FULL, {}) == []
