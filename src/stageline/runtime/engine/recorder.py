"""A recorder of when each action ran, and the timeline that it makes, with reasons of idle time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from stageline.costs import Costs
from stageline.errors import ModelError
from stageline.report.idle import Idle
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runtime.accelerators.device_clock import DeviceClock
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.engine.minibatch import Purpose, RecordedAction, Timer
from stageline.runtime.engine.recorded_times import Senders, Times, gathered, on_host_clock
from stageline.schedules.action import Action, Kind
from stageline.schedules.program.stream import Period, action_at
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

Rows = Sequence[Sequence[RecordedAction]]  # by rank


class Recording(NamedTuple):
    """The times of a step or a stream."""

    times: Times
    purpose: Purpose
    num_microbatches: int
    num_minibatches: int
    period: Period
    senders: Senders


class Recorder:
    """Records the last step of a `with pipe.trace()` block; its `timeline` exists after it.

    State: the last recording, the timeline that it makes, and clocks of devices by rank. They are
    read when the block begins and ends: within it nothing waits for a device.
    """

    def __init__(self, clocks: Mapping[int, DeviceClock]) -> None:
        self.clocks = clocks
        self.recording: Recording | None = None  # the last one in the block
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Return the measured timeline, in ms."""
        if self._timeline is None:
            raise ModelError("the trace is not over: read its timeline after the `with` block")
        return self._timeline

    @property
    def timers(self) -> dict[int, Timer]:
        """Return how the ranks on devices take the time."""
        return {rank: clock.accelerator.record_time for rank, clock in self.clocks.items()}

    def finish(
        self, schedule: Schedule, balance: tuple[int, ...], collectives: Collectives
    ) -> None:
        """Make the timeline of what was recorded on all ranks."""
        recording = self.recording
        if recording is None:
            spans: Any = ((),) * schedule.num_ranks
            self._timeline = Timeline(spans, schedule.placement, balance=balance)
            return
        for clock in self.clocks.values():
            clock.stop()
        own = on_host_clock(recording.times, self.clocks)
        self.recording = recording._replace(times=gathered(own, collectives, recording.senders))
        self._timeline = timeline_of(self.recording, schedule, balance)

    def __getattr__(self, name: str) -> Any:
        """Read the timeline's attributes, as a trace's own were in version 0.1."""
        if name.startswith("_"):
            raise AttributeError(name)
        warnings.warn(
            f"reading {name!r} of a trace is deprecated: use trace.timeline.{name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self.timeline, name)

    def __str__(self) -> str:
        return str(self.timeline)


def timeline_of(recording: Recording, schedule: Schedule, balance: tuple[int, ...]) -> Timeline:
    """Return a timeline in milliseconds."""
    rows = [_in_milliseconds(recording, rank) for rank in range(schedule.num_ranks)]
    is_stream = schedule.is_stream or recording.num_minibatches > 1
    named = _named(recording.period) if is_stream else _unnamed
    spans = tuple(tuple(Span(named(m), m.start, m.end) for m in row) for row in rows)
    name = f"{schedule.name}, measured in ms"
    timeline = Timeline(spans, schedule.placement, name=name, balance=balance)
    if recording.purpose is not Purpose.TRAIN or is_stream:
        return timeline
    return replace(timeline, idle=_idle(rows, _that_ran(schedule, recording), timeline))


def _unnamed(time: RecordedAction) -> Action:
    return time.action


def _named(period: Period) -> Callable[[RecordedAction], Action]:
    """Name actions by their numbers in the stream, with versions of weights."""
    entries = {entry.action: entry for row in period.rows for entry in row}
    return lambda time: action_at(entries[time.action], time.minibatch, period.num_microbatches)


def _in_milliseconds(recording: Recording, rank: int) -> list[RecordedAction]:
    began = min((row[0].asked for row in recording.times.values() if row), default=0.0)
    return [
        time._replace(
            asked=1e3 * (time.asked - began),
            sent=1e3 * (time.sent - began),
            start=1e3 * (time.start - began),
            end=1e3 * (time.end - began),
        )
        for time in recording.times.get(rank, [])
    ]


def _that_ran(schedule: Schedule, recording: Recording) -> Schedule:
    """Return the schedule without the micro-batches that a small batch has left out."""
    last = recording.num_microbatches
    rows = (tuple(a for a in row if a.microbatch < last) for row in schedule.actions)
    return replace(schedule, actions=tuple(rows))


def _idle(rows: Rows, schedule: Schedule, timeline: Timeline) -> tuple[Idle, ...]:
    """Attribute idle time: stages of equal length would leave the bubble, the rest is imbalance."""
    even = simulate(schedule, _even_costs(rows))
    found = []
    for row, busy, even_busy in zip(rows, timeline.busy, even.busy, strict=True):
        host, transfer = _host(row), _transfer(row)
        waiting = max(0.0, timeline.makespan - busy - host - transfer)
        bubble = min(waiting, even.makespan - even_busy)
        found.append(Idle(bubble, waiting - bubble, transfer, host))
    return tuple(found)


def _even_costs(rows: Rows) -> Costs:
    """Return one time for each kind of action, on all stages; B is I and W at once."""
    totals: dict[Kind, dict[object, float]] = {}
    for row in rows:
        for time in row:  # an action that is recomputed has two times
            kind = totals.setdefault(time.action.kind, {})
            kind[time.action] = kind.get(time.action, 0.0) + time.end - time.start
    mean = {kind: fmean(times.values()) for kind, times in totals.items()}
    backward = mean.get(Kind.B, 0.0) / 2
    return Costs(mean[Kind.F], mean.get(Kind.I, backward), mean.get(Kind.W, backward))


def _host(row: Iterable[RecordedAction]) -> float:
    """Return the time between the end of an action and the next, but for waiting."""
    host, free = 0.0, 0.0
    for time in row:
        has_waited = time.sent > time.asked
        host += (time.asked if has_waited else time.start) - free
        free = time.end
    return host


def _transfer(row: Iterable[RecordedAction]) -> float:
    """Return the time from when the last message that an action needed was sent to its start."""
    return sum(time.start - time.sent for time in row if time.sent > time.asked)
