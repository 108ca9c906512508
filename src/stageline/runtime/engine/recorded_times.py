"""Bring the times that ranks recorded, by clocks of devices and of processes, to one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from stageline.runtime.accelerators.device_clock import DeviceClock
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.backends.processes.clock import SHIFT
from stageline.runtime.engine.minibatch import RecordedAction
from stageline.schedules.action import Action

Times = dict[int, list[RecordedAction]]  # by rank
Senders = Mapping[Action, Sequence[Action]]  # the actions that made the messages an action awaits


def on_host_clock(times: Times, clocks: Mapping[int, DeviceClock]) -> Times:
    """Return times by the host's clock, where events of devices stand for them."""
    return {
        rank: [_timed_by(clocks[rank], each) for each in row] if rank in clocks else row
        for rank, row in times.items()
    }


def gathered(own: Times, collectives: Collectives, senders: Senders) -> Times:
    """Return the times of all ranks, by a clock that all processes have."""
    shifted = {rank: [_shifted(time, SHIFT) for time in row] for rank, row in own.items()}
    found = [pair for each in collectives.gather(shifted, "a trace") for pair in each.items()]
    times = {rank: [_shifted(time, -SHIFT) for time in row] for rank, row in found}
    if any(isnan(time.sent) for row in times.values() for time in row):
        return _with_sent(times, senders)
    return times


def _timed_by(clock: DeviceClock, time: RecordedAction) -> RecordedAction:
    asked, start, end = map(clock.host_time, (time.asked, time.start, time.end))
    return time._replace(asked=asked, start=start, end=end)


def _with_sent(times: Times, senders: Senders) -> Times:
    """Return times with those at which messages were sent: when what made them had ended.

    A message between devices does not tell. An action that is recorded twice was recomputed first.
    """
    ends = {(time.minibatch, time.action): time.end for row in times.values() for time in row}

    def sent(time: RecordedAction) -> float:
        made = (ends.get((time.minibatch, sender)) for sender in senders.get(time.action, ()))
        # clocks of two devices may differ by some µs
        return min(time.start, max((end for end in made if end is not None), default=0.0))

    return {
        rank: [time._replace(sent=sent(time)) if isnan(time.sent) else time for time in row]
        for rank, row in times.items()
    }


def _shifted(time: RecordedAction, by: float) -> RecordedAction:
    """Shift all times of an action; 0.0 for `sent` means that nothing was sent."""
    action, asked, sent, start, end, minibatch = time
    sent = sent + by if sent else 0.0
    return RecordedAction(action, asked + by, sent, start + by, end + by, minibatch)
