"""Advice is taken, and the gain is what was expected: with layers that take a known time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.runs.findings.finding import Finding
from stageline.runs.findings.findings import findings
from stageline.runs.read import read_run
from stageline.zoo.emulated import Occupy

DATA = [(torch.ones(8, 1), torch.ones(8, 1))]
SECONDS = 0.001  # of each part of a layer, for a micro-batch of all samples' quarter
WITHIN = 8.0  # percent of a step: sleeps are late on a busy machine


def train(folder: Path, layers: list[Occupy], **options: Any) -> float:
    """Train and return the seconds of the step that other work on the machine disturbed least."""
    with sl.Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, num_ranks=2, **options) as p:
        optimizer = torch.optim.SGD(p.parameters(), 0.0)
        reports = sl.fit(p, DATA, optimizer, steps=8, folder=folder, report_every=1)
    return min(report.step_seconds for report in reports[1:])


def layers(seconds: float = SECONDS) -> list[Occupy]:
    return [Occupy(seconds, seconds, seconds) for _ in range(6)]


def advice(folder: Path, title: str) -> Finding:
    return next(finding for finding in findings(read_run(folder)) if finding.title == title)


def measured_gain(
    folder: Path, before: Callable[[Path], float], after: Callable[[Path], float]
) -> float:
    """Train both several times, one after the other, since the machine may be busy at times."""
    names = [folder / str(number) for number in range(3)]
    pairs = [(before(name / "before"), after(name / "after")) for name in names]
    old, new = (min(times) for times in zip(*pairs, strict=True))
    gain: float = 100 * (1 - new / old)
    return gain


@pytest.mark.slow
def test_better_cut_gains_what_was_expected(tmp_path: Path) -> None:
    gain = measured_gain(
        tmp_path,
        lambda folder: train(folder, layers(), num_microbatches=4, balance=[1, 5]),
        lambda folder: train(folder, layers(), num_microbatches=4, balance=[3, 3]),
    )
    finding = advice(tmp_path / "0" / "before", "uneven stages")
    assert "balance=[3, 3]" in finding.advice
    assert finding.gain == pytest.approx(gain, abs=WITHIN)


@pytest.mark.slow
def test_more_microbatches_gain_what_was_expected(tmp_path: Path) -> None:
    gain = measured_gain(
        tmp_path,
        lambda folder: train(folder, layers(2 * SECONDS), num_microbatches=2),
        lambda folder: train(folder, layers(SECONDS / 2), num_microbatches=8),
    )
    finding = advice(tmp_path / "0" / "before", "few micro-batches")
    assert "num_microbatches=8" in finding.advice
    assert finding.gain == pytest.approx(gain, abs=WITHIN)
