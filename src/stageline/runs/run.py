"""Define `Run`: all that is known of a run of `sl.fit`, as plain frozen values.

Numbers are finite. Text is on one line and has no control characters, but it may be anything else,
such as HTML: whoever shows it in a page has to escape it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stageline.report.timeline import Timeline
from stageline.runs.breakdown import RankTime
from stageline.runs.records import Configuration, Environment, Event, Metrics

UNFINISHED, UNKNOWN = "unfinished", "unknown"


@dataclass(frozen=True)
class Run:
    """A run, read from its folder. What has not been written yet is empty or None."""

    name: str  # of the folder
    folder: Path
    status: str  # "finished", "failed", "interrupted", "unfinished" (or killed), or "unknown"
    started: float | None  # seconds since 1970; of the last start, if it was resumed
    updated: float  # when one of its files last changed, in seconds since 1970
    resumed_from: int  # the step of the checkpoint that it continued from, or 0
    configuration: Configuration
    environment: Environment
    metrics: tuple[Metrics, ...]  # the curves, by ascending step; thinned to a few thousand
    measured: tuple[Timeline, ...]  # the last recorded steps in ms, the latest one last
    measured_step: int  # the number of the latest of them, or 0
    predicted: Timeline | None  # of the same step in ms, as the plan expected it
    breakdown: tuple[RankTime, ...]  # where each rank's time went in the latest recorded step
    events: tuple[Event, ...]  # the last ones, in the order in which they were written
    checkpoints: tuple[int, ...]  # the steps of those that are in the folder now
    notes: tuple[str, ...]  # what could not be read, and why

    @property
    def step(self) -> int:
        """Return the number of steps done, as far as it was reported."""
        return self.metrics[-1].step if self.metrics else self.resumed_from

    @property
    def errors(self) -> tuple[Event, ...]:
        """Return the errors among the events: what ended the run, and failed checkpoints."""
        return tuple(event for event in self.events if event.is_error)

    @property
    def warnings(self) -> tuple[Event, ...]:
        """Return the warnings among the events."""
        return tuple(event for event in self.events if event.is_warning)


@dataclass(frozen=True)
class RunSummary:
    """What a list of runs shows of one."""

    name: str
    folder: Path
    status: str
    started: float | None
    updated: float
    schedule: str
    num_ranks: int
    step: int
    steps: int  # to be done
    loss: float | None  # the last that was reported; None if there is none, or it is not finite
    samples_per_second: float | None
