"""What each rank holds over time: activations until I, a part and gradients until W, weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stageline.costs import Costs
from stageline.report.spans import Level, Span
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement


class Change(NamedTuple):
    """What an action does to what is held: as it starts, only while it runs, and as it ends."""

    start: float
    during: float
    end: float


def memory_curves(
    spans: Sequence[Sequence[Span]], placement: Placement, costs: Costs
) -> tuple[tuple[Level, ...], ...]:
    static, changes = costs.static(placement), _changes(placement, costs)
    return tuple(tuple(_curve(row, changes, static[rank])) for rank, row in enumerate(spans))


def peak_memory(
    rows: Sequence[Sequence[Action]], placement: Placement, costs: Costs
) -> tuple[float, ...]:
    """By rank: it follows from the order of a rank's actions, whatever their times."""
    static, changes = costs.static(placement), _changes(placement, costs)
    return tuple(static[rank] + _peak(row, changes) for rank, row in enumerate(rows))


def _changes(placement: Placement, costs: Costs) -> dict[Kind, list[Change]]:
    """An F takes its activation as it starts; a gradient frees what no other needs as it ends."""
    fields = ("activation", "retained", "working_set", "waiting")
    found: dict[Kind, list[Change]] = {kind: [] for kind in (Kind.F, Kind.I, Kind.B, Kind.W)}
    for row in zip(*(costs.per_stage(f, len(placement)) for f in fields), strict=True):
        activation, retained, working_set, waiting = row
        found[Kind.F].append(Change(activation, 0.0, 0.0))
        found[Kind.I].append(Change(0.0, working_set, retained + waiting - activation))
        found[Kind.B].append(Change(0.0, working_set, -activation))
        found[Kind.W].append(Change(0.0, 0.0, -retained - waiting))
    return found


def _curve(
    row: Sequence[Span], changes: dict[Kind, list[Change]], static: float
) -> Iterator[Level]:
    held = 0.0
    yield Level(0.0, held, static)
    for (stage, kind, _, _, _), start, end in row:
        if kind in changes:
            at_start, during, at_end = changes[kind][stage]
            held += at_start
            if at_start or during:
                yield Level(start, held, static + held + during)
            held += at_end
            if at_end or during:
                yield Level(end, held, static + held)


def _peak(row: Sequence[Action], changes: dict[Kind, list[Change]]) -> float:
    held = peak = 0.0
    for stage, kind, _, _, _ in row:
        if kind in changes:
            at_start, during, at_end = changes[kind][stage]
            held += at_start
            peak = max(peak, held + during)
            held += at_end
            peak = max(peak, held)
    return peak
