"""Compute the memory that each rank holds over time: activations, gradients and weights.

An activation is held from F to I, a part of it and the gradients for W until W. Where weights
change while micro-batches are in flight, each version counts as `parameters` from the step that
makes it until its last use, and the latest version is always held:

    F0@0 F1@0 B0@0 STEP@1 F2@1 B1@0 STEP@2 B2@1 STEP@3
                   +1          -1   +1     -1

A step makes a copy of the weights only if the previous version will still be used; otherwise it
updates them in place. A copy is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stageline.costs import Costs
from stageline.report.spans import MemoryLevel, Span
from stageline.schedules.action import NO_VERSION, Action, Kind
from stageline.schedules.placement import Placement, Replicas


class MemoryChange(NamedTuple):
    """The change of memory by an action: at its start, only while it runs, and at its end."""

    start: float
    during: float
    end: float


def memory_curves(
    spans: Sequence[Sequence[Span]], placement: Placement, costs: Costs, replicas: Replicas = ()
) -> tuple[tuple[MemoryLevel, ...], ...]:
    """Return the memory of each rank over time."""
    static, changes = costs.static(placement, replicas), memory_changes(len(placement), costs)
    copy = costs.per_stage("parameters", len(placement))
    return tuple(tuple(_curve(row, changes, copy, static[rank])) for rank, row in enumerate(spans))


def peak_memory(
    rows: Sequence[Sequence[Action]], placement: Placement, costs: Costs, replicas: Replicas = ()
) -> tuple[float, ...]:
    """Return the peak memory of each rank, which depends only on the order of its actions."""
    static, changes = costs.static(placement, replicas), memory_changes(len(placement), costs)
    copy = costs.per_stage("parameters", len(placement))
    return tuple(static[rank] + _peak(row, changes, copy) for rank, row in enumerate(rows))


def memory_changes(num_stages: int, costs: Costs) -> dict[Kind, list[MemoryChange]]:
    """Return the changes by kind and stage.

    An F allocates its activation at its start, a gradient frees what no other needs at its end.
    """
    fields = ("activation", "retained", "working_set", "waiting")
    found: dict[Kind, list[MemoryChange]] = {kind: [] for kind in (Kind.F, Kind.I, Kind.B, Kind.W)}
    found[Kind.STEP] = [MemoryChange(0.0, 0.0, 0.0)] * num_stages
    for row in zip(*(costs.per_stage(f, num_stages) for f in fields), strict=True):
        activation, retained, working_set, waiting = row
        found[Kind.F].append(MemoryChange(activation, 0.0, 0.0))
        found[Kind.I].append(MemoryChange(0.0, working_set, retained + waiting - activation))
        found[Kind.B].append(MemoryChange(0.0, working_set, -activation))
        found[Kind.W].append(MemoryChange(0.0, 0.0, -retained - waiting))
    return found


def _curve(
    row: Sequence[Span],
    changes: dict[Kind, list[MemoryChange]],
    copy: Sequence[float],
    weights: float,
) -> Iterator[MemoryLevel]:
    held = 0.0
    yield MemoryLevel(0.0, held, weights)
    copies = version_changes([span.action for span in row])
    for ((stage, kind, _, _, _), start, end), more in zip(row, copies, strict=True):
        if kind in changes:
            at_start, during, at_end = changes[kind][stage]
            held += at_start
            if more > 0:
                weights += copy[stage]
            if at_start or during or more > 0:
                yield MemoryLevel(start, held, weights + held + during)
            held += at_end
            if more < 0:
                weights -= copy[stage]
            if at_end or during or more < 0:
                yield MemoryLevel(end, held, weights + held)


def _peak(
    row: Sequence[Action], changes: dict[Kind, list[MemoryChange]], copy: Sequence[float]
) -> float:
    held = peak = 0.0
    for (stage, kind, _, _, _), more in zip(row, version_changes(row), strict=True):
        if kind in changes:
            at_start, during, at_end = changes[kind][stage]
            held += at_start
            if more > 0:
                held += copy[stage]
            peak = max(peak, held + during)
            held += at_end
            if more < 0:
                held -= copy[stage]
            peak = max(peak, held)
    return peak


def version_changes(row: Sequence[Action]) -> list[int]:
    """Return, for each action of a rank, 1 if it copies the weights and -1 if it frees a copy.

    >>> from stageline.schedules.schedule import Schedule
    >>> rows = Schedule.from_text("0F0@0 0F1@0 0B0@0 0STEP@1 0B1@0 0STEP@2").actions
    >>> version_changes(rows[0])
    [0, 0, 0, 1, -1, 0]
    """
    if all(action.version == NO_VERSION for action in row):
        return [0] * len(row)  # the common case: a planner calls this hundreds of times
    last_use = {
        (action.stage, action.version): position
        for position, action in enumerate(row)
        if action.kind is not Kind.STEP
    }
    latest: dict[int, int] = {}  # version, by stage
    changes = [0] * len(row)
    for position, (stage, kind, _, _, version) in enumerate(row):
        if kind is Kind.STEP:
            changes[position] = int(last_use.get((stage, version - 1), -1) > position)
            latest[stage] = version
        elif version < latest.get(stage, 0):
            changes[position] = -int(last_use[stage, version] == position)
    return changes


def memory_steps(levels: Sequence[MemoryLevel]) -> dict[float, float]:
    """Return the memory held from each time on, without changes that cancel at the same time.

    >>> held = [(0, 0, 5), (1, 1, 6), (3, 0, 5), (3, 1, 6), (4, 0, 5)]
    >>> memory_steps([MemoryLevel(*level) for level in held])
    {0: 5, 1: 6, 4: 5}
    """
    last_at = {level.time: level.total for level in levels}
    changes: dict[float, float] = {}
    before = None
    for time, held in last_at.items():
        if held != before:
            changes[time] = held
        before = held
    return changes
