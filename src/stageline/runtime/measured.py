"""From the moments that ranks noted during a step to a timeline."""

from __future__ import annotations

from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runtime.executor import Step
from stageline.schedules.schedule import Schedule


def measured(timeline: Timeline, step: Step | None, schedule: Schedule) -> None:
    """Fill an empty timeline with what was measured, in milliseconds."""
    if step is None:
        return
    rows = [step.moments.get(rank, []) for rank in range(schedule.num_ranks)]
    began = min((row[0].asked for row in rows if row), default=0.0)
    spans = tuple(
        tuple(Span(m.action, 1e3 * (m.start - began), 1e3 * (m.end - began)) for m in row)
        for row in rows
    )
    object.__setattr__(timeline, "spans", spans)
    object.__setattr__(timeline, "name", f"{schedule.name}, measured")
