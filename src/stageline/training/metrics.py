"""Reports on the last steps, and the files that they are written to: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any, TypeVar

import torch

from stageline.checkpoint.group import checkpoint_group, sum_over_replicas
from stageline.errors import ModelError
from stageline.model import trees
from stageline.pipeline import Pipeline
from stageline.report.summary import percent
from stageline.report.timeline import Timeline
from stageline.runs.records import METRICS, replace_file
from stageline.runtime.accelerators.measured_devices import peak_bytes
from stageline.runtime.batches.microbatches import num_samples
from stageline.runtime.batches.result import StepResult
from stageline.training.data import Batch
from stageline.units import format_bytes

BOARD = "tensorboard"
T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """Measurements of the steps since the previous report.

    `bubble` and `busy` are those of the last of these steps. In a stream steps overlap, and both
    are unknown.
    """

    step: int
    loss: float  # the mean over these steps
    samples_per_second: float  # of all replicas together
    tokens_per_second: float | None  # None if the inputs are not token ids
    bubble: float | None  # idle fraction of all ranks
    busy: tuple[float, ...]  # fraction of the step, by rank
    peak_memory: tuple[int, ...]  # bytes of the device or of the process, by process
    batch_size: float = 0.0  # samples of a step, of all replicas
    step_seconds: float = 0.0  # from one step to the next, with everything between them
    data_seconds: tuple[float, ...] = ()  # of a step, waiting for the loader, by process
    optimizer_seconds: tuple[float, ...] = ()  # of a step: clipping, optimizer and scheduler
    save_seconds: tuple[float, ...] = ()  # of a step, waiting for checkpoints
    time: float = 0.0  # of the report, in seconds since 1970

    @property
    def summary(self) -> str:
        speed = (
            f"{self.samples_per_second:,.1f} samples/s"
            if self.tokens_per_second is None
            else f"{self.tokens_per_second:,.0f} tokens/s"
        )
        memory = format_bytes(max(self.peak_memory))
        bubble = "" if self.bubble is None else f"bubble {percent(self.bubble)}   "
        return f"loss {self.loss:.4f}   {speed}   {bubble}{memory}"

    def words(self) -> str:
        """Return `summary`, under its name in version 0.1."""
        message = "Report.words() is deprecated: use summary"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.summary


WriteReport = Callable[[Report], None]
PARTS = ("data", "optimizer", "save")  # of the time between steps


class ReportInterval:
    """Accumulates results, counts and times since the last report."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.since = perf_counter()
        self.results: list[StepResult] = []
        self.num_samples = 0
        self.num_tokens: int | None = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, batch: Batch, result: StepResult) -> None:
        self.results.append(result)
        self.num_samples += num_samples(batch.inputs, batch.target)
        tokens = num_tokens(batch.inputs)
        has_tokens = tokens is not None and self.num_tokens is not None
        self.num_tokens = self.num_tokens + tokens if has_tokens else None  # type: ignore[operator]

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time of a block as part of the interval that it ends in."""
        began = perf_counter()
        yield
        self.seconds[part] += perf_counter() - began

    def timed(self, part: str, items: Iterator[T]) -> Iterator[T]:
        """Yield items, and count the time that each takes to come."""
        while True:
            with self.timing(part):
                item = next(items, None)
            if item is None:
                return
            yield item

    def report(self, pipe: Pipeline, step: int, timeline: Timeline | None) -> Report:
        """Return the report on this interval; all ranks call it."""
        losses = [float(result.loss) for result in self.results]
        seconds, count = perf_counter() - self.since, len(self.results)
        samples = sum_over_replicas(pipe, self.num_samples)
        makespan = max(timeline.makespan, 1e-9) if timeline else 1.0
        devices = {parameter.device for parameter in pipe.parameters()}
        here = peak_memory(devices), *(self.seconds[part] / count for part in PARTS)
        memory, data, optimizer, save = zip(*checkpoint_group(pipe).gather(here), strict=True)
        return Report(
            step=step,
            loss=sum(losses) / count,
            samples_per_second=samples / seconds,
            tokens_per_second=self.num_tokens
            and self.num_tokens / self.num_samples * samples / seconds,
            bubble=timeline.step_bubble if timeline else None,
            busy=tuple(busy / makespan for busy in timeline.busy) if timeline else (),
            peak_memory=memory,
            batch_size=samples / count,
            step_seconds=seconds / count,
            data_seconds=data,
            optimizer_seconds=optimizer,
            save_seconds=save,
            time=time(),
        )


@contextmanager
def report_files(folder: Path, step: int, *, tensorboard: bool) -> Iterator[WriteReport]:
    """Yield a function that appends reports; lines of earlier runs are kept up to `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / METRICS
    _drop_later_lines(path, step)
    board = _board(folder / BOARD, step) if tensorboard else None
    with path.open("a") as lines:

        def write(report: Report) -> None:
            lines.write(json.dumps(asdict(report)) + "\n")
            lines.flush()
            if board is not None:
                for name, value in _scalars(report):
                    board.add_scalar(name, value, report.step)

        try:
            yield write
        finally:
            if board is not None:
                board.close()


def num_tokens(inputs: Any) -> int | None:
    """Return the size of the first matrix of integers, one row a sample; None if there is none."""
    kinds = (torch.int16, torch.int32, torch.int64)
    found = (t for t in trees.tensors(inputs) if t.dtype in kinds)
    # one integer for each sample is a class, or the time step of a diffusion model
    return next((t.numel() for t in found if t.ndim > 1), None)


def peak_memory(devices: set[torch.device]) -> int:
    """Return the peak bytes of this process's accelerators, or of the process if it has none."""
    if (num_bytes := peak_bytes(devices)) is not None:
        return num_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _scalars(report: Report) -> Iterator[tuple[str, float]]:
    for name, value in asdict(report).items():
        if isinstance(value, tuple):
            yield from ((f"{name}/{number}", part) for number, part in enumerate(value))
        elif name != "step" and value is not None:
            yield name, value


def _drop_later_lines(path: Path, step: int) -> None:
    """Delete lines of steps that will be repeated, and one that a crash left unfinished."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        replace_file(path, "".join(f"{line}\n" for line in kept).encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  it is optional
    except ImportError:
        raise ModelError(
            f"tensorboard=True, but it is not installed: install it, or read {METRICS} instead"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
