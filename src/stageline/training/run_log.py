"""What the first process of a run shows, and writes to the run's folder, while it trains."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from stageline.checkpoint.group import PendingSave, checkpoint_group
from stageline.checkpoint.write_tensors import convert_write_errors
from stageline.report.timeline import Timeline
from stageline.runs.records import (
    EVENTS,
    FAILED,
    FINISHED,
    INTERRUPTED,
    MOST_ACTIONS,
    NOT_SAVED,
    RECENT_STEPS,
    RUN,
    SAVED,
    STARTED,
    TIMELINE,
    WARNING,
    Event,
    RecordedStep,
    RunRecord,
    append_line,
    as_json,
    replace_file,
)
from stageline.training.describe_run import configuration_of, environment_of
from stageline.training.metrics import Report, WriteReport, report_files
from stageline.training.progress import progress
from stageline.training.run import TrainingRun

MOST_WARNINGS = 100  # different ones that are recorded


class RunFolder:
    """The files of a run but its checkpoints and metrics.

    State: the number of steps done, the last recorded steps as JSON, and the warnings seen.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.recorded: deque[bytes] = deque(maxlen=RECENT_STEPS)
        self.warned: set[str] = set()

    def start(self, run: TrainingRun, done: int) -> None:
        """Describe the run. What an earlier run with this folder did stays in events.jsonl."""
        self.step = done
        self.folder.mkdir(parents=True, exist_ok=True)
        record = RunRecord(time.time(), done, configuration_of(run), environment_of(run))
        replace_file(self.folder / RUN, as_json(record))
        (self.folder / TIMELINE).unlink(missing_ok=True)  # it may be of another schedule
        self.add(STARTED, f"resumed from step {done}" if done else "")

    def add(self, kind: str, message: str = "", step: int | None = None) -> None:
        """Append an event; threads may do so at the same time."""
        event = Event(time.time(), kind, self.step if step is None else step, message)
        append_line(self.folder / EVENTS, event)

    def record(self, step: int, timeline: Timeline) -> None:
        """Store the timeline of a step beside those of the last steps that were recorded."""
        if sum(map(len, timeline.spans)) <= MOST_ACTIONS:
            self.recorded.append(as_json(RecordedStep.of(step, timeline)))
            contents = b'{"steps":[' + b",\n".join(self.recorded) + b"]}"
            replace_file(self.folder / TIMELINE, contents)

    def add_when_saved(self, step: int, pending: PendingSave) -> None:
        """Append an event when a checkpoint is complete, or could not be written."""

        def add(result: Future[Path]) -> None:
            error = result.exception()
            if error is None:
                self.add(SAVED, result.result().name, step)
            else:
                self.add(NOT_SAVED, str(error), step)

        pending.result.add_done_callback(add)

    @contextmanager
    def errors_added(self) -> Iterator[None]:
        """Record how the block ends, and the warnings that are shown in it."""
        try:
            with warnings_to(self._add_warning):
                yield
        except BaseException as error:
            kind = FAILED if isinstance(error, Exception) else INTERRUPTED
            with suppress(OSError):  # the error counts, and the disk may be full
                self.add(kind, f"{type(error).__name__}: {error}")
            raise
        self.add(FINISHED)

    def _add_warning(self, text: str) -> None:
        if text not in self.warned and len(self.warned) < MOST_WARNINGS:
            self.warned.add(text)
            with suppress(OSError):  # or whoever warned would get this error
                self.add(WARNING, text)


@dataclass(frozen=True)
class RunLog:
    """What the first process shows and stores; other processes have an empty one."""

    show: Callable[[int, str], None] | None = None
    store: WriteReport | None = None
    folder: RunFolder | None = None

    def report(self, report: Report, timeline: Timeline | None) -> None:
        if self.show is not None:
            self.show(report.step, report.summary)
        if self.store is not None:
            self.store(report)
        if self.folder is not None and timeline is not None:
            self.folder.record(report.step, timeline)

    def step_done(self, step: int) -> None:
        if self.folder is not None:
            self.folder.step = step

    def saves(self, step: int, pending: PendingSave | None) -> None:
        if self.folder is not None and pending is not None:
            self.folder.add_when_saved(step, pending)


def open_log(stack: ExitStack, run: TrainingRun, done: int) -> RunLog:
    """Return the log of a run that has done some steps before; it is closed with the stack."""
    if not checkpoint_group(run.pipe).is_first:
        return RunLog()
    console = Console(highlight=False, markup=False)
    show = stack.enter_context(progress(console, run.steps, done))
    if done >= run.steps:
        console.print(f"all {run.steps} steps are done already")
    elif done:
        console.print(f"resuming from step {done}")
    if run.folder is None:
        return RunLog(show)
    folder = RunFolder(run.folder)
    with convert_write_errors(run.folder):
        store = stack.enter_context(report_files(run.folder, done, tensorboard=run.tensorboard))
        if done >= run.steps:
            return RunLog(show, store)  # nothing will happen: the record stays that of the last run
        folder.start(run, done)
    stack.enter_context(folder.errors_added())
    return RunLog(show, store, folder)


@contextmanager
def warnings_to(add: Callable[[str], None]) -> Iterator[None]:
    """Call `add` with the text of every warning that is shown in the block, by any thread."""
    before = warnings.showwarning

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        add(str(message))
        before(message, *args, **kwargs)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:  # nobody else has replaced it meanwhile
            warnings.showwarning = before
