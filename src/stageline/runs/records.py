"""The files of a run folder, what is stored in them, and how they are written.

    run.json         what runs, on what, and what was planned; replaced when training starts
    metrics.jsonl    a line for each report
    timeline.json    the last recorded steps, action by action; replaced at each report
    events.jsonl     a line for each start, warning, checkpoint and end
    step-00000100/   a checkpoint

The same classes describe what is written and what is read. A folder may come from anywhere, so
text is shortened and freed of control characters, and numbers are finite and within limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from stageline.limits import MOST_AMOUNT, MOST_LAYERS, MOST_STAGES
from stageline.report.timeline import Timeline

RUN, METRICS, TIMELINE, EVENTS = "run.json", "metrics.jsonl", "timeline.json", "events.jsonl"
STARTED, FINISHED, FAILED, INTERRUPTED = "started", "finished", "failed", "interrupted"
WARNING, SAVED, NOT_SAVED = "warning", "checkpoint saved", "checkpoint failed"
MOST_STEPS = 10**15  # which checkpoints are limited to as well
RECENT_STEPS = 3  # recorded steps in timeline.json: the median of 3 is not the one slow step
MOST_ACTIONS = 20_000  # of a recorded step: 0.4 MB, written in 30 ms
LONGEST_TEXT = 500  # characters of a name or message
MOST_MILLISECONDS = 1e12  # 30 years
DIGITS = 4  # decimals of milliseconds: clocks are no better than 0.1 µs


def printable(text: str) -> str:
    """Return text on one line, without control characters, and at most `LONGEST_TEXT` long.

    >>> printable("loss\\tis\\x1b[31m high\\n")
    'loss is[31m high'
    """
    shown = text[: 2 * LONGEST_TEXT]
    words = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in shown).split()
    clean = " ".join(words)
    return clean if len(clean) <= LONGEST_TEXT else clean[: LONGEST_TEXT - 1] + "…"


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= MOST_AMOUNT else None


Text = Annotated[str, AfterValidator(printable)]
Whole = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Amount = Annotated[float, Field(ge=0, le=MOST_AMOUNT)]
Measured = Annotated[float | None, AfterValidator(_finite)]  # None if it is NaN or infinite
ByStage = Annotated[tuple[Amount, ...], Field(max_length=MOST_STAGES)]
ByRank = Annotated[tuple[Amount, ...], Field(max_length=MOST_STAGES)]
ByLayer = Annotated[tuple[Amount, ...], Field(max_length=MOST_LAYERS)]
Numbers = Annotated[tuple[Whole, ...], Field(max_length=MOST_STAGES)]
Texts = Annotated[tuple[Text, ...], Field(max_length=MOST_LAYERS)]
Milliseconds = Annotated[float, Field(ge=0, le=MOST_MILLISECONDS)]
Times = Annotated[tuple[Milliseconds, ...], Field(max_length=MOST_ACTIONS)]
IdleTimes = tuple[Milliseconds, Milliseconds, Milliseconds, Milliseconds]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def stored(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks its fields, without converting their types."""
    config = ConfigDict(strict=True, extra="ignore")  # a later version may store more
    made: Any = dataclass(frozen=True, config=config)(cls)
    return made  # type: ignore[no-any-return]  # it is the same class


@stored
class PlannedCosts:
    """What the plan of a pipeline expected."""

    description: Text
    seconds: Amount  # per step
    costs: dict[Text, ByStage]  # by field of `Costs`, by stage; seconds and bytes
    peak_memory: ByRank  # bytes


@stored
class Configuration:
    """What was trained and how, as `sl.Pipeline` and `sl.fit` were called."""

    schedule: Text = ""  # its name
    num_ranks: Whole = 0
    num_replicas: Whole = 1  # of the whole pipeline
    num_microbatches: Whole = 0
    placement: Numbers = ()  # the rank of each stage
    balance: Numbers = ()  # the number of layers of each stage
    recompute: Texts = ()  # by stage
    backend: Text = ""
    options: dict[Text, Text] = Field(default_factory=dict)  # of `sl.Options`, but for defaults
    optimizer: Text = ""
    scheduler: Text = ""
    max_norm: Measured = None
    steps: Whole = 0
    report_every: Whole = 0
    save_every: Whole = 0
    num_parameters: Amount = 0  # of the model
    layers: Texts = ()  # their names
    layer_types: Texts = ()  # the classes of their modules
    layer_costs: Annotated[
        tuple[Amount, ...], Field(max_length=MOST_LAYERS)
    ] = ()  # FLOPs or the like
    plan: PlannedCosts | None = None  # if the pipeline was made from a plan


@stored
class Environment:
    """The machine and the versions that a run began with."""

    stageline: Text = ""
    torch: Text = ""
    python: Text = ""
    system: Text = ""
    num_cores: Whole = 0  # of the first process's host
    num_threads: Whole = 0  # that torch uses in one operation
    num_processes: Whole = 0
    devices: Texts = ()  # by rank


@stored
class RunRecord:
    """The contents of run.json."""

    started: Amount  # seconds since 1970
    resumed_from: Whole = 0  # the step of the checkpoint, or 0
    configuration: Configuration = Field(default_factory=Configuration)
    environment: Environment = Field(default_factory=Environment)


@stored
class Metrics:
    """A line of metrics.jsonl: means over the steps since the line before. Times are seconds.

    A process that has no accelerator gives the peak of its memory since it started.
    """

    step: Whole
    loss: Measured = None  # None if it was NaN or infinite
    samples_per_second: Measured = None
    tokens_per_second: Measured = None  # None if the inputs are not token ids
    bubble: Measured = None  # idle fraction of all ranks in the last step; None in a stream
    busy: ByRank = ()  # fraction of the last step
    peak_memory: ByRank = ()  # bytes, by process
    batch_size: Measured = None  # samples of a step, of all replicas
    step_seconds: Measured = None  # from step to step, with everything between them
    data_seconds: ByRank = ()  # of a step, waiting for the loader, by process
    optimizer_seconds: ByRank = ()  # of a step: clipping, optimizer and scheduler, by process
    save_seconds: ByRank = ()  # of a step, waiting for checkpoints, by process
    time: Measured = None  # when it was reported, in seconds since 1970


@stored
class RecordedStep:
    """The actions of one step with their times in milliseconds; a tuple for each rank."""

    step: Whole
    placement: Numbers
    balance: Numbers
    actions: Annotated[tuple[str, ...], Field(max_length=MOST_STAGES)]  # '0F0 0F1 0B0 …'
    starts: Annotated[tuple[Times, ...], Field(max_length=MOST_STAGES)]
    ends: Annotated[tuple[Times, ...], Field(max_length=MOST_STAGES)]
    # bubble, imbalance, transfer and host; () if unknown
    idle: Annotated[tuple[IdleTimes, ...], Field(max_length=MOST_STAGES)]
    replicas: Numbers = ()  # of each stage; () means one each

    @staticmethod
    def of(step: int, timeline: Timeline) -> RecordedStep:
        """Return the actions of a measured timeline."""
        return RecordedStep(
            step,
            timeline.placement,
            timeline.balance or (),
            tuple(" ".join(str(span.action) for span in row) for row in timeline.spans),
            tuple(_rounded(span.start for span in row) for row in timeline.spans),
            tuple(_rounded(span.end for span in row) for row in timeline.spans),
            tuple(cast("IdleTimes", _rounded(parts)) for parts in timeline.idle),
            timeline.replicas,
        )


@stored
class RecordedSteps:
    """The contents of timeline.json; the latest step is the last."""

    steps: Annotated[tuple[RecordedStep, ...], Field(max_length=RECENT_STEPS)] = ()


@stored
class Event:
    """A line of events.jsonl."""

    time: Amount  # seconds since 1970
    kind: Text  # one of the constants above
    step: Whole  # the steps that were done
    message: Text = ""

    @property
    def is_error(self) -> bool:
        return self.kind in (FAILED, NOT_SAVED)

    @property
    def is_warning(self) -> bool:
        return self.kind == WARNING


def as_json(value: object) -> bytes:
    """Return a stored value as JSON on one line."""
    return TypeAdapter(type(value)).dump_json(value)


def replace_file(path: Path, contents: bytes) -> None:
    """Write a file such that readers see the old contents or the new, and nothing in between."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # not through a link that somebody put there
        file.write(contents)
    temporary.replace(path)


def append_line(path: Path, value: object) -> None:
    """Append a stored value to a file of lines, in one write."""
    with path.open("ab", buffering=0) as file:
        file.write(as_json(value) + b"\n")


def _rounded(times: Iterable[float]) -> tuple[float, ...]:
    # a recorded time may be a rounding error below 0
    return tuple(max(0.0, round(time, DIGITS)) for time in times)
