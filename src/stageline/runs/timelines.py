"""Measured and predicted timelines of a run, made from what its files say, and checked."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from stageline.costs import PER_STAGE, Costs
from stageline.errors import ReportError
from stageline.report.idle import Idle
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runs.breakdown import actions_once
from stageline.runs.records import (
    DIGITS,
    MOST_ACTIONS,
    TIMELINE,
    RecordedStep,
    RecordedSteps,
    RunRecord,
)
from stageline.schedules.action import COMPUTE
from stageline.schedules.check import check
from stageline.schedules.csv import parse_cells
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

TIMES = ("forward", "input_grad", "weight_grad", "transfer", "recompute", "reduce")  # in seconds


def measured_timelines(record: RunRecord, recorded: RecordedSteps) -> tuple[Timeline, ...]:
    """Return the recorded steps that have the schedule of the latest, in the order of steps."""
    if not recorded.steps:
        return ()
    name = record.configuration.schedule
    *earlier, last = (_timeline(step, name) for step in recorded.steps)
    order = schedule_of(last)
    check(order)
    same = (each for each in earlier if schedule_of(each) == order)
    return (*same, last)


def schedule_of(timeline: Timeline) -> Schedule:
    """Return the schedule that a timeline ran, each action once though it may have recomputed."""
    rows = tuple(map(actions_once, timeline.spans))
    return Schedule(rows, timeline.placement, timeline.name, timeline.replicas)


def predicted_timeline(record: RunRecord, measured: tuple[Timeline, ...]) -> Timeline | None:
    """Return what the plan expected of the recorded step; None if there is no plan or step."""
    plan = record.configuration.plan
    if plan is None or not measured:
        return None
    if unknown := sorted(plan.costs.keys() - set(PER_STAGE)):
        raise ReportError(f"the plan was not read: its costs have the field {unknown[0]!r}")
    fields: dict[str, Any] = {
        name: tuple(1e3 * value for value in values) if name in TIMES else values
        for name, values in plan.costs.items()
    }
    predicted = simulate(schedule_of(measured[-1]), Costs(**fields))
    return replace(predicted, name=titled(record.configuration.schedule, "predicted in ms"))


def titled(schedule: str, words: str) -> str:
    """Return the title of a timeline; a schedule of the user's own may have no name."""
    return f"{schedule}, {words}" if schedule else words


def _timeline(step: RecordedStep, schedule: str) -> Timeline:
    """Return a recorded step as a timeline; raise `ReportError` if its parts do not agree."""
    rows = list(zip(step.actions, step.starts, step.ends, strict=False))
    lengths = {len(step.actions), len(step.starts), len(step.ends), len(step.idle) or len(rows)}
    if len(lengths) > 1 or not rows:
        raise ReportError(f"{TIMELINE} was not read: it has {sorted(lengths)} ranks")
    total = sum(text.count(" ") + 1 for text in step.actions)
    if total > MOST_ACTIONS:
        raise ReportError(f"{TIMELINE} was not read: a step has more than {MOST_ACTIONS:,} actions")
    spans = tuple(_row(rank, *row) for rank, row in enumerate(rows))
    if len(step.balance) not in (0, len(step.placement)):
        raise ReportError(f"{TIMELINE} was not read: balance and placement differ in length")
    return Timeline(
        spans,
        step.placement,
        name=titled(schedule, "measured in ms"),
        idle=tuple(Idle(*parts) for parts in step.idle),
        balance=step.balance or None,
        replicas=step.replicas,
    )


def _row(
    rank: int, text: str, starts: tuple[float, ...], ends: tuple[float, ...]
) -> tuple[Span, ...]:
    actions = list(parse_cells(text.split(), rank))
    if not len(actions) == len(starts) == len(ends):
        raise ReportError(f"{TIMELINE} was not read: rank {rank} has not one time for each action")
    if any(action.kind not in COMPUTE for action in actions):
        raise ReportError(f"{TIMELINE} was not read: rank {rank} has unknown kinds of actions")
    times = [round(time, DIGITS) for pair in zip(starts, ends, strict=True) for time in pair]
    if any(after < before for before, after in pairwise(times)):
        raise ReportError(f"{TIMELINE} was not read: times of rank {rank} are not in order")
    return tuple(map(Span, actions, times[::2], times[1::2]))
