"""What each rank holds over time: activations until I, a part and gradients until W, weights.

Where weights change while micro-batches are on their way, each version counts as `parameters` from
the step that makes it until its last use, and the latest always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stageline.costs import Costs
from stageline.report.measures.versions import version_changes
from stageline.report.spans import Level, Span
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement, Replicas


class Change(NamedTuple):
    """What an action does to what is held: as it starts, only while it runs, and as it ends."""

    start: float
    during: float
    end: float


def memory_curves(
    spans: Sequence[Sequence[Span]], placement: Placement, costs: Costs, replicas: Replicas = ()
) -> tuple[tuple[Level, ...], ...]:
    static, changes = costs.static(placement, replicas), _changes(len(placement), costs)
    copy = costs.per_stage("parameters", len(placement))
    return tuple(tuple(_curve(row, changes, copy, static[rank])) for rank, row in enumerate(spans))


def peak_memory(
    rows: Sequence[Sequence[Action]], placement: Placement, costs: Costs, replicas: Replicas = ()
) -> tuple[float, ...]:
    """By rank: it follows from the order of a rank's actions, whatever their times."""
    static, changes = costs.static(placement, replicas), _changes(len(placement), costs)
    copy = costs.per_stage("parameters", len(placement))
    return tuple(static[rank] + _peak(row, changes, copy) for rank, row in enumerate(rows))


def _changes(num_stages: int, costs: Costs) -> dict[Kind, list[Change]]:
    """An F takes its activation as it starts; a gradient frees what no other needs as it ends."""
    fields = ("activation", "retained", "working_set", "waiting")
    found: dict[Kind, list[Change]] = {kind: [] for kind in (Kind.F, Kind.I, Kind.B, Kind.W)}
    found[Kind.STEP] = [Change(0.0, 0.0, 0.0)] * num_stages
    for row in zip(*(costs.per_stage(f, num_stages) for f in fields), strict=True):
        activation, retained, working_set, waiting = row
        found[Kind.F].append(Change(activation, 0.0, 0.0))
        found[Kind.I].append(Change(0.0, working_set, retained + waiting - activation))
        found[Kind.B].append(Change(0.0, working_set, -activation))
        found[Kind.W].append(Change(0.0, 0.0, -retained - waiting))
    return found


def _curve(
    row: Sequence[Span], changes: dict[Kind, list[Change]], copy: Sequence[float], weights: float
) -> Iterator[Level]:
    held = 0.0
    yield Level(0.0, held, weights)
    copies = version_changes([span.action for span in row])
    for ((stage, kind, _, _, _), start, end), more in zip(row, copies, strict=True):
        if kind in changes:
            at_start, during, at_end = changes[kind][stage]
            held += at_start
            if more > 0:
                weights += copy[stage]
            if at_start or during or more > 0:
                yield Level(start, held, weights + held + during)
            held += at_end
            if more < 0:
                weights -= copy[stage]
            if at_end or during or more < 0:
                yield Level(end, held, weights + held)


def _peak(row: Sequence[Action], changes: dict[Kind, list[Change]], copy: Sequence[float]) -> float:
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
