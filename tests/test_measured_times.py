"""Times that are measured. `make test` runs these when nothing else runs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.zoo.cases import grouped
from stageline.zoo.emulated import Occupy

Build = Callable[..., sl.Pipeline]


@pytest.fixture
def build() -> Iterator[Build]:
    """A pipeline of two ranks and four micro-batches, unless told otherwise."""
    built: list[sl.Pipeline] = []

    def make(model: Any, **options: Any) -> sl.Pipeline:
        sizes = {"num_ranks": 2, "num_microbatches": 4}
        built.append(sl.Pipeline(model, mse_loss, **grouped(sizes | options)))
        return built[-1]

    yield make
    for pipe in built:
        pipe.close()


def idle_shares(pipe: sl.Pipeline) -> dict[str, float]:
    """Return the median idle time by reason, after the threads have started."""
    batch = torch.ones(8, 1), torch.zeros(8, 1)
    pipe.step(*batch)
    found = [shares_of_a_step(pipe, *batch) for _ in range(5)]
    return {name: median(shares[name] for shares in found) for name in found[0]}


def shares_of_a_step(pipe: sl.Pipeline, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return idle time by reason, as a share of ranks × makespan."""
    with pipe.trace() as trace:
        pipe.step(x, y)
    timeline = trace.timeline
    for idle, busy in zip(timeline.idle, timeline.busy, strict=True):
        assert sum(idle) == pytest.approx(timeline.makespan - busy, rel=1e-6)
        assert min(idle) >= 0
    names = ("bubble", "imbalance", "transfer", "host")
    assert all(name in str(timeline) for name in names)
    whole = timeline.num_ranks * timeline.makespan
    return {name: sum(getattr(idle, name) for idle in timeline.idle) / whole for name in names}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_trap_16_a_trace_tells_a_slow_stage_from_a_bubble(build: Build, schedule: str) -> None:
    quick, slow = (Occupy(seconds, seconds, seconds) for seconds in (0.004, 0.02))
    even = idle_shares(build([quick, copy.deepcopy(quick)], schedule=schedule))
    uneven = idle_shares(build([quick, slow], schedule=schedule))
    assert uneven["imbalance"] > even["imbalance"] + 0.1


def test_trap_16_a_trace_shows_what_more_micro_batches_cure(build: Build) -> None:
    layers = [Occupy(0.004, 0.004, 0.004) for _ in range(2)]
    few, many = (idle_shares(build(layers, num_microbatches=m)) for m in (1, 8))
    assert few["bubble"] > 0.4  # of 1/2 and 1/9, if nothing else took time
    assert many["bubble"] < 0.2


def test_a_running_pipeline_gets_faster_when_slow_layers_share_their_rank_with_fewer(
    build: Build,
) -> None:
    """Four layers that are three times as slow as the others, emulated, and measured."""
    layers = [Occupy(*[0.002 if number < 4 else 0.006] * 3) for number in range(8)]
    pipe = build(layers, balance=[4, 4])
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)

    def traced() -> sl.Timeline:
        with pipe.trace() as trace:
            pipe.step(torch.ones(4, 1), torch.ones(4, 1))
        return trace.timeline

    before = [traced() for _ in range(3)]
    found = pipe.replan(optimizer, before)
    assert found.new_balance == (5, 3) == pipe.balance
    after = [traced() for _ in range(3)]
    fastest = min(timeline.makespan for timeline in after)
    assert fastest < 0.9 * min(timeline.makespan for timeline in before)
    assert fastest == pytest.approx(found.new_milliseconds, rel=0.1)
    with pytest.raises(sl.PlanError, match="give timelines since the last replan only"):
        pipe.replan(optimizer, before)


def processor_seconds(*command: str) -> float:
    """Return the processor time of a command, which others on the machine hardly change."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])  # of processes that have ended


def test_draw_answers_in_under_six_tenths_of_a_second() -> None:
    """On a slow machine, in three times what it takes to import what the terminal needs."""
    imports = sys.executable, "-c", "import typer, rich.console, rich.table, pydantic"
    limit = max(0.6, 3 * min(processor_seconds(*imports) for _ in range(3)))
    draw = str(Path(sys.executable).parent / "stageline"), "draw", "1f1b"
    assert any(processor_seconds(*draw) < limit for _ in range(5))
