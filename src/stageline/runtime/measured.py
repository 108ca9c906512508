"""From the moments that ranks noted during a step to a timeline, with the reasons of idle time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from stageline.costs import Costs
from stageline.report.idle import Idle
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runtime.executor import Moment, Purpose, Trace
from stageline.schedules.action import Kind
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

Rows = Sequence[Sequence[Moment]]  # by rank


def fill(timeline: Timeline, trace: Trace, schedule: Schedule) -> None:
    """Fill an empty timeline with what was measured, in milliseconds."""
    rows = [_in_milliseconds(trace, rank) for rank in range(schedule.num_ranks)]
    spans = tuple(tuple(Span(m.action, m.start, m.end) for m in row) for row in rows)
    object.__setattr__(timeline, "spans", spans)
    object.__setattr__(timeline, "name", f"{schedule.name}, measured in ms")
    if trace.purpose is Purpose.TRAIN:
        object.__setattr__(timeline, "idle", _idle(rows, _that_ran(schedule, trace), timeline))


def _in_milliseconds(trace: Trace, rank: int) -> list[Moment]:
    began = min((row[0].asked for row in trace.moments.values() if row), default=0.0)
    return [
        Moment(action, *(1e3 * (time - began) for time in times))
        for action, *times in trace.moments.get(rank, [])
    ]


def _that_ran(schedule: Schedule, trace: Trace) -> Schedule:
    """Without the micro-batches that a small batch has left out."""
    last = trace.num_microbatches
    rows = (tuple(a for a in row if a.microbatch < last) for row in schedule.actions)
    return replace(schedule, actions=tuple(rows))


def _idle(rows: Rows, schedule: Schedule, timeline: Timeline) -> tuple[Idle, ...]:
    """All stages as long as their mean would leave the bubble; the rest of waiting is imbalance."""
    even = simulate(schedule, _even_costs(rows))
    found = []
    for row, busy, even_busy in zip(rows, timeline.busy, even.busy, strict=True):
        host, transfer = _host(row), _transfer(row)
        waiting = max(0.0, timeline.makespan - busy - host - transfer)
        bubble = min(waiting, even.makespan - even_busy)
        found.append(Idle(bubble, waiting - bubble, transfer, host))
    return tuple(found)


def _even_costs(rows: Rows) -> Costs:
    """One time for each kind of action, on all stages and micro-batches; B is I and W at once."""
    totals: dict[Kind, dict[object, float]] = {}
    for row in rows:
        for moment in row:  # an action that is recomputed has two moments
            kind = totals.setdefault(moment.action.kind, {})
            kind[moment.action] = kind.get(moment.action, 0.0) + moment.end - moment.start
    mean = {kind: fmean(times.values()) for kind, times in totals.items()}
    backward = mean.get(Kind.B, 0.0) / 2
    return Costs(mean[Kind.F], mean.get(Kind.I, backward), mean.get(Kind.W, backward))


def _host(row: Iterable[Moment]) -> float:
    """Between the end of an action and the next, but for waiting."""
    host, free = 0.0, 0.0
    for moment in row:
        has_waited = moment.sent > moment.asked
        host += (moment.asked if has_waited else moment.start) - free
        free = moment.end
    return host


def _transfer(row: Iterable[Moment]) -> float:
    """From when the last message that an action needed was sent to when it began."""
    return sum(moment.start - moment.sent for moment in row if moment.sent > moment.asked)
