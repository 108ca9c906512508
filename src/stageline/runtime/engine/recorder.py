"""From the moments that ranks noted during a step to a timeline, with the reasons of idle time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from stageline.costs import Costs
from stageline.report.idle import Idle
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runtime.engine.loop import Moment, Purpose, Trace
from stageline.schedules.action import Action, Kind
from stageline.schedules.program.stream import Period, action_at
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

Rows = Sequence[Sequence[Moment]]  # by rank


def fill(timeline: Timeline, trace: Trace, schedule: Schedule, period: Period) -> None:
    """Give a timeline what was measured, in milliseconds."""
    rows = [_in_milliseconds(trace, rank) for rank in range(schedule.num_ranks)]
    is_stream = schedule.is_stream or trace.num_minibatches > 1
    named = _named(period) if is_stream else _as_it_is
    spans = tuple(tuple(Span(named(m), m.start, m.end) for m in row) for row in rows)
    object.__setattr__(timeline, "spans", spans)
    object.__setattr__(timeline, "name", f"{schedule.name}, measured in ms")
    if trace.purpose is Purpose.TRAIN and not is_stream:
        object.__setattr__(timeline, "idle", _idle(rows, _that_ran(schedule, trace), timeline))


def leave_empty(timeline: Timeline, num_ranks: int) -> None:
    """Of a block in which nothing ran."""
    object.__setattr__(timeline, "spans", ((),) * num_ranks)


def _as_it_is(moment: Moment) -> Action:
    return moment.action


def _named(period: Period) -> Callable[[Moment], Action]:
    """By their numbers in the stream, with versions of weights."""
    beats = {beat.action: beat for row in period.rows for beat in row}
    return lambda moment: action_at(beats[moment.action], moment.minibatch, period.num_microbatches)


def _in_milliseconds(trace: Trace, rank: int) -> list[Moment]:
    began = min((row[0].asked for row in trace.moments.values() if row), default=0.0)
    return [
        moment._replace(
            asked=1e3 * (moment.asked - began),
            sent=1e3 * (moment.sent - began),
            start=1e3 * (moment.start - began),
            end=1e3 * (moment.end - began),
        )
        for moment in trace.moments.get(rank, [])
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
