"""What each rank holds over time: activations until I, a part and gradients until W, weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stageline.costs import Costs
from stageline.report.spans import Level, Span
from stageline.schedules.action import Kind
from stageline.schedules.placement import Placement


def memory_curves(
    spans: Sequence[Sequence[Span]], placement: Placement, costs: Costs
) -> tuple[tuple[Level, ...], ...]:
    static = costs.static(placement)
    fields = ("activation", "retained", "working_set", "waiting")
    sizes = list(zip(*(costs.per_stage(f, len(placement)) for f in fields), strict=True))
    return tuple(tuple(_curve(row, sizes, static[rank])) for rank, row in enumerate(spans))


def _curve(row: Sequence[Span], sizes: list[tuple[float, ...]], static: float) -> Iterator[Level]:
    """An F takes its activation as it starts; a gradient frees what no other needs as it ends."""
    held = 0.0
    yield Level(0.0, held, static)
    for (stage, kind, _, _), start, end in row:
        activation, retained, working_set, waiting = sizes[stage]
        if kind is Kind.F:
            held += activation
            yield Level(start, held, static + held)
            continue
        if kind is Kind.W:
            held -= retained + waiting
        elif kind is Kind.I or kind is Kind.B:
            if working_set:
                yield Level(start, held, static + held + working_set)
            held -= activation - retained - waiting if kind is Kind.I else activation
        yield Level(end, held, static + held)
