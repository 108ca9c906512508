"""The comparison with peers runs from end to end, on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.compare.agreement import DisagreementError, check_agreement, plain_outcome
from benchmarks.compare.contestants.loops import plain, plain_step
from benchmarks.compare.report.ratios import median_with_interval, paired
from benchmarks.compare.stages import alive_at
from benchmarks.compare.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]


def compare(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.compare", *arguments]
    ended = subprocess.run(
        [*command, "--quick", "--folder", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_stageline_and_torch_take_turns_and_what_is_stored_is_not_measured_again(
    tmp_path: Path,
) -> None:
    chosen = ("pipelines", "--workload", "gpt-small", "--schedule", "zbv")
    assert "torch's; Stageline's own differs" in compare(tmp_path, *chosen)
    path = tmp_path / "results.json"
    stored = path.read_text()
    [cell] = json.loads(stored).values()
    assert {"stageline", "torch", "limit"} < cell["times"].keys()
    assert {len(times) for times in cell["times"].values()} == {2}  # rounds
    assert cell["machine"]["threads"] == 1
    assert (tmp_path / "ratios.svg").exists()
    ratios = json.loads((tmp_path / "summary.json").read_text())["pipelines"]
    assert ("stageline", "torch") in {(each["of"], each["over"]) for each in ratios}
    compare(tmp_path, *chosen)
    assert path.read_text() == stored


def test_contestants_that_compute_something_else_are_not_timed() -> None:
    case = WORKLOADS["resnet"].case(2, is_quick=True)
    good = plain(case.copy(), 8)
    twice = plain_step(case.copy(), 8, [*range(8), 0])
    check_agreement([good], case, plain_outcome(case, 8))
    bad = replace(good, name="bad", step=twice)
    with pytest.raises(DisagreementError, match="bad, rank 0: the loss is"):
        check_agreement([bad], case, plain_outcome(case, 8))
    idle = replace(good, name="idle", step=lambda: None)
    with pytest.raises(DisagreementError, match="idle: no gradient of stem"):
        check_agreement([idle], case, plain_outcome(case, 8))


def test_values_that_skip_a_stage_are_alive_at_every_cut_between() -> None:
    layers = WORKLOADS["encoder-decoder"].case(2, is_quick=True).layers
    names = [layer.name for layer in layers]
    alive = [alive_at(layers, place, "source") for place in range(1, len(layers))]
    assert names == ["embedding", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "head"]
    assert alive == [("memory", "x"), ("x", "memory"), ("x", "memory"), ("memory", "x"), ("x",)]


def test_the_interval_of_a_median_needs_no_distribution() -> None:
    """With 15 rounds it is from the fourth ratio to the twelfth: 1 - 2 × 576 / 2^15."""
    found = median_with_interval([float(n) for n in range(15, 0, -1)])
    assert (found.median, found.low, found.high) == (8, 4, 12)
    assert found.confidence == pytest.approx(0.96484375)


def test_ratios_are_paired_by_round() -> None:
    assert paired([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]).low == 2.0
