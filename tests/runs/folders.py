"""Run folders that tests put together: what `sl.fit` writes, with numbers that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from stageline.costs import Costs
from stageline.report.idle import Idle
from stageline.report.timeline import Timeline
from stageline.runs.records import (
    EVENTS,
    METRICS,
    RUN,
    TIMELINE,
    Configuration,
    Environment,
    Event,
    RecordedStep,
    RecordedSteps,
    RunRecord,
    append_line,
    as_json,
)
from stageline.schedules.build import build_schedule
from stageline.simulation.simulate import simulate

START = 1_700_000_000.0  # seconds since 1970


def timeline(
    num_ranks: int, num_microbatches: int, schedule: str = "1f1b", **costs: Any
) -> Timeline:
    """A step that took exactly what `costs` say, in milliseconds."""
    built = build_schedule(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    made = simulate(built, Costs(**costs))
    idle = tuple(Idle(made.makespan - busy, 0.0, 0.0, 0.0) for busy in made.busy)
    return replace(made, costs=None, sent=None, idle=idle)


def configuration(measured: Timeline, **fields: Any) -> Configuration:
    """The configuration of a run that took this step."""
    schedule = measured.schedule
    made = Configuration(
        schedule=measured.name,
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        balance=(1,) * schedule.num_stages,
        recompute=("never",) * schedule.num_stages,
        backend="threads",
        optimizer="AdamW",
        steps=100,
        report_every=10,
        layers=tuple(f"blocks.{stage}" for stage in range(schedule.num_stages)),
        layer_costs=(1.0,) * schedule.num_stages,
    )
    return replace(made, **fields)


def line(step: int, **fields: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "loss": 2.0 / step,
        "samples_per_second": 100.0,
        "tokens_per_second": None,
        "bubble": 0.25,
        "busy": [0.75, 0.75],
        "peak_memory": [2**30],
        "batch_size": 32.0,
        "step_seconds": 0.32,
        "data_seconds": [0.001],
        "optimizer_seconds": [0.002],
        "save_seconds": [0.0],
        "time": START + step,
    } | fields


def write_run(
    folder: Path,
    measured: Timeline | None = None,
    lines: list[dict[str, Any]] | None = None,
    events: tuple[tuple[str, int, str], ...] = (("started", 0, ""), ("finished", 100, "")),
    **fields: Any,
) -> Path:
    """Write the folder of a run; `fields` are those of its configuration."""
    folder.mkdir(parents=True)
    step = measured or timeline(2, 4)
    environment = Environment("0.1.0", "2.13.0", "3.11.7", "Linux x86_64", 2, 1, 1, ("cpu", "cpu"))
    record = RunRecord(START, 0, configuration(step, **fields), environment)
    (folder / RUN).write_bytes(as_json(record))
    recorded = RecordedSteps((RecordedStep.of(100, step),))
    (folder / TIMELINE).write_bytes(as_json(recorded))
    found = [line(step) for step in range(10, 101, 10)] if lines is None else lines
    (folder / METRICS).write_text("".join(json.dumps(each) + "\n" for each in found))
    for number, (kind, at, message) in enumerate(events):
        append_line(folder / EVENTS, Event(START + number, kind, at, message))
    return folder
