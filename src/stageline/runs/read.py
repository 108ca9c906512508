"""Read a run from its folder, or the list of runs in a folder, also while they are written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from stageline.arguments import shown
from stageline.errors import ReportError, StagelineError
from stageline.files import checked_path
from stageline.runs.breakdown import rank_times
from stageline.runs.files import last_lines, open_inside, read_inside, some_lines
from stageline.runs.records import (
    EVENTS,
    FAILED,
    FINISHED,
    INTERRUPTED,
    METRICS,
    RUN,
    STARTED,
    TIMELINE,
    Event,
    Metrics,
    RecordedSteps,
    RunRecord,
    printable,
)
from stageline.runs.run import UNFINISHED, UNKNOWN, Run, RunSummary
from stageline.runs.timelines import measured_timelines, predicted_timeline

MOST_POINTS = 2000  # of a curve: more than a screen has pixels
MOST_EVENTS = 1000
FEW_EVENTS = 20  # to see how a run ended: a list of a thousand runs takes half a second
MOST_RUNS = 1000  # in a list
MOST_ENTRIES = 100_000  # of a folder that is searched for runs
CHECKPOINT = re.compile(r"step-(\d{8,15})")
NOTHING = RunRecord(0.0)
T = TypeVar("T")


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Return what is known of a run of `sl.fit`, from its folder.

    A run that is still being written can be read at any time. What cannot be read is left out, and
    the reason is among the run's `notes`. Raise `ReportError` if the folder is not that of a run.
    """
    place = _checked_folder(folder)
    if not _is_run(place):
        raise ReportError(
            f"{shown(str(place))} is not the folder of a run: it has neither {RUN} nor {METRICS}; "
            "give the folder= that was given to sl.fit"
        )
    notes: list[str] = []
    record = _read(lambda: _value(RunRecord, place, RUN), notes) or NOTHING
    metrics = _read_lines(Metrics, METRICS, lambda: some_lines(place, METRICS, MOST_POINTS), notes)
    metrics = _ascending(metrics)
    events = _read_lines(Event, EVENTS, lambda: last_lines(place, EVENTS, MOST_EVENTS), notes)
    recorded = _read(lambda: _value(RecordedSteps, place, TIMELINE), notes) or RecordedSteps()
    measured = _read(lambda: measured_timelines(record, recorded), notes) or ()
    predicted = _read(lambda: predicted_timeline(record, measured), notes)
    return Run(
        name=_name(place),
        folder=place,
        status=_status(events),
        started=record.started or None,
        updated=_updated(place),
        resumed_from=record.resumed_from,
        configuration=record.configuration,
        environment=record.environment,
        metrics=metrics,
        measured=measured,
        measured_step=recorded.steps[-1].step if measured else 0,
        predicted=predicted,
        breakdown=rank_times(measured[-1], metrics[-1] if metrics else None) if measured else (),
        events=events,
        checkpoints=_checkpoints(place),
        notes=tuple(notes),
    )


def list_runs(folder: str | os.PathLike[str]) -> list[RunSummary]:
    """Return the runs in a folder, the latest first: the folder itself, and folders in it.

    Links are not followed, since they may lead anywhere. What cannot be read is left out.
    """
    place = _checked_folder(folder)
    found = {path for path in (place, *_folders_in(place)) if _is_run(path)}
    latest = sorted(found, key=lambda path: (-_updated(path), path.name))
    return [_summary(path) for path in latest[:MOST_RUNS]]


def _summary(place: Path) -> RunSummary:
    notes: list[str] = []
    record = _read(lambda: _value(RunRecord, place, RUN), notes) or NOTHING
    last = _read_lines(Metrics, METRICS, lambda: last_lines(place, METRICS, 1), notes)
    events = _read_lines(Event, EVENTS, lambda: last_lines(place, EVENTS, FEW_EVENTS), notes)
    metrics = last[-1] if last else Metrics(record.resumed_from)
    return RunSummary(
        name=_name(place),
        folder=place,
        status=_status(events),
        started=record.started or None,
        updated=_updated(place),
        schedule=record.configuration.schedule,
        num_ranks=record.configuration.num_ranks,
        step=metrics.step,
        steps=record.configuration.steps,
        loss=metrics.loss,
        samples_per_second=metrics.samples_per_second,
    )


def _read(read: Callable[[], T], notes: list[str]) -> T | None:
    """Return what a function reads; or None, and note why it cannot be read."""
    try:
        return read()
    except StagelineError as error:
        notes.append(printable(str(error)))
    except OSError as error:
        notes.append(printable(f"a file was not read: {error.strerror}"))
    return None


def _value(kind: type[T], folder: Path, name: str) -> T | None:
    contents = read_inside(folder, name)
    if contents is None:
        return None
    try:
        return TypeAdapter(kind).validate_json(contents)
    except ValidationError as error:
        raise ReportError(f"{name} was not read: {_problem(error)}") from None


def _read_lines(
    kind: type[T], name: str, lines: Callable[[], list[bytes]], notes: list[str]
) -> tuple[T, ...]:
    adapter, found, problems = TypeAdapter(kind), [], []
    for line in _read(lines, notes) or []:
        try:
            found.append(adapter.validate_json(line))
        except ValidationError as error:
            problems.append(_problem(error))
    if problems:
        count = f"{len(problems)} lines" if len(problems) > 1 else "1 line"
        notes.append(f"{count} of {name} could not be read: {problems[0]}")
    return tuple(found)


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))[:100]
    return printable(f"{place}: {first['msg'].lower()}" if place else first["msg"].lower())


def _ascending(metrics: tuple[Metrics, ...]) -> tuple[Metrics, ...]:
    """Return one line for each step, in order, also of a file that was put together by hand."""
    by_step = {line.step: line for line in metrics}
    return tuple(by_step[step] for step in sorted(by_step))


def _status(events: tuple[Event, ...]) -> str:
    """Return how the run ended: its last start or end says so."""
    for event in reversed(events):
        if event.kind in (FINISHED, FAILED, INTERRUPTED):
            return event.kind
        if event.kind == STARTED:
            break
    return UNFINISHED if events else UNKNOWN


def _checked_folder(folder: str | os.PathLike[str]) -> Path:
    place = checked_path(folder, ReportError)
    if not place.is_dir():
        raise ReportError(f"{shown(str(place))} is not a folder: give one that exists")
    return place


def _is_run(folder: Path) -> bool:
    """Return whether a folder has a file of a run that can be opened."""
    return any(_opens(folder, name) for name in (RUN, METRICS))


def _opens(folder: Path, name: str) -> bool:
    try:
        file = open_inside(folder, name)
    except (ReportError, OSError):
        return False
    if file is None:
        return False
    file.close()
    return True


def _folders_in(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
                if entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
    except OSError as error:
        raise ReportError(f"{shown(str(folder))} cannot be read: {error.strerror}") from None


def _checkpoints(folder: Path) -> tuple[int, ...]:
    names = (path.name for path in _folders_in(folder))
    return tuple(sorted(int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name))))


def _updated(folder: Path) -> float:
    """Return when a file of the run last changed."""
    times = [0.0]
    for name in (RUN, METRICS, TIMELINE, EVENTS):
        try:
            times.append((folder / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def _name(folder: Path) -> str:
    return printable(folder.resolve().name) or "run"
