"""Map the times of a device's events to the host's `perf_counter`.

    device │ ●──── F0 ──── B0 ─────────── ●     its own clock: another beginning, maybe another rate
    host   │ ●                            ●     waits for the device only here

The clocks are compared before and after what is timed, and taken to drift evenly between. At both
ends the host records an event on the idle device and waits for it: when it occurred is known to
half of that wait, some 10 µs on a GPU, and a time between is wrong by no more than the larger of
the two halves. CUDA states times to 0.5 µs, as a float of milliseconds, so they are counted from
the nearer end.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

from stageline.runtime.accelerators.accelerator import Accelerator

TRIES = 5  # comparisons at each end, of which the one with the shortest wait counts


class Comparison(NamedTuple):
    """An event, and when it occurred by `perf_counter`, to plus or minus the error."""

    event: Any
    host: float
    error: float


class DeviceClock:
    """The clock of a device. State: how it compared with the host's at first and at last."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.first = self.last = compare(accelerator)

    def stop(self) -> None:
        """Compare the clocks again, behind all that is to be timed."""
        self.last = compare(self.accelerator)

    @property
    def error(self) -> float:
        """Return how many seconds a time may be wrong by."""
        return max(self.first.error, self.last.error)

    def host_time(self, event: Any) -> float:
        """Return when an event between the comparisons occurred, by `perf_counter`."""
        between = self.accelerator.seconds_between
        first, last = self.first, self.last
        since = between(first.event, event)
        total = between(first.event, last.event)
        rate = (last.host - first.host) / total
        if since < total / 2:
            return first.host + rate * since
        return last.host - rate * between(event, last.event)


def compare(accelerator: Accelerator) -> Comparison:
    """Compare a device's clock with the host's, while the device does nothing else."""
    accelerator.synchronize()
    return min((_compare(accelerator) for _ in range(TRIES)), key=lambda each: each.error)


def _compare(accelerator: Accelerator) -> Comparison:
    before = perf_counter()
    event = accelerator.record_time()
    accelerator.synchronize()
    after = perf_counter()
    return Comparison(event, (before + after) / 2, (after - before) / 2)
