"""sl.fit: steps, reports and checkpoints; what was stopped goes on where it was."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.arguments import check_size
from stageline.checkpoint.contents import check_parameters, places
from stageline.checkpoint.desk import desk_of
from stageline.checkpoint.fitting import tried_state
from stageline.checkpoint.folder import latest
from stageline.checkpoint.load import Loaded, load_accepted
from stageline.checkpoint.save import save
from stageline.errors import CheckpointError, ModelError
from stageline.pipeline import Pipeline
from stageline.report.timeline import Timeline
from stageline.runtime.engine import microbatches
from stageline.runtime.engine.result import StepResult
from stageline.training.data import Batch, Position, batches
from stageline.training.metrics import Report, Write, files, num_tokens, peak_memory
from stageline.training.progress import progress


@dataclass(frozen=True)
class Run:
    """What is trained, and how. The scheduler steps after every step of the optimizer."""

    pipe: Pipeline
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    max_norm: float | None
    folder: Path | None
    save_every: int
    report_every: int
    keep: int

    def resume(self) -> tuple[int, Position]:
        """Steps that are done, and where the data stands."""
        folder = self.folder
        if folder is None or not desk_of(self.pipe).by_first(lambda: latest(folder) is not None):
            return 0, Position()
        step, data = load_accepted(folder, self.pipe, self.optimizer, self._accept)
        if self.scheduler is not None:
            _, state = data["scheduler"]
            self.scheduler.load_state_dict(tried_state(state, self.scheduler, folder))
        return step, Position(*data["position"])

    def _accept(self, loaded: Loaded) -> None:
        """Raise an error for a checkpoint that this run cannot go on from."""
        assert self.folder is not None  # it was loaded from there
        step, data = loaded
        if not isinstance(data, dict) or not {"position", "scheduler"} <= data.keys():
            raise CheckpointError(
                f"the checkpoint of step {step} in {str(self.folder)!r} is not of sl.fit, so it "
                "does not say where the data stood: give fit a folder of its own"
            )
        kind, state = data["scheduler"]
        if kind != self.scheduler_name:
            raise CheckpointError(
                f"the checkpoint of step {step} was saved with scheduler {kind}, but now it is "
                f"{self.scheduler_name}: use the same"
            )
        if self.scheduler is not None:
            tried_state(state, self.scheduler, self.folder)

    @property
    def scheduler_name(self) -> str:
        return "none" if self.scheduler is None else type(self.scheduler).__name__

    def step(self, batch: Batch) -> StepResult:
        result = self.pipe.step(batch.inputs, batch.target)
        if self.max_norm is not None:
            self.pipe.clip_grad_norm_(self.max_norm)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return result

    def save(self, step: int, position: Position, *, wait: bool) -> None:
        if self.folder is not None:
            state = None if self.scheduler is None else self.scheduler.state_dict()
            data = {"position": position, "scheduler": (self.scheduler_name, state)}
            save(
                self.folder,
                self.pipe,
                self.optimizer,
                step=step,
                data=data,
                keep=self.keep,
                wait=wait,
            )


@dataclass
class Interval:
    """The steps since the last report. State: what is known of them so far."""

    since: float = field(default_factory=perf_counter)
    results: list[StepResult] = field(default_factory=list)
    num_samples: int = 0
    num_tokens: int | None = 0

    def add(self, batch: Batch, result: StepResult) -> None:
        self.results.append(result)
        self.num_samples += microbatches.num_samples(batch.inputs, batch.target)
        tokens = num_tokens(batch.inputs)
        has_tokens = tokens is not None and self.num_tokens is not None
        self.num_tokens = self.num_tokens + tokens if has_tokens else None  # type: ignore[operator]

    def report(self, pipe: Pipeline, step: int, timeline: Timeline | None) -> Report:
        """All ranks make it: it is told by all of them."""
        losses = [float(result.loss) for result in self.results]
        seconds = perf_counter() - self.since
        samples = pipe._session.assembly.collectives.total(self.num_samples)
        makespan = max(timeline.makespan, 1e-9) if timeline else 1.0
        devices = {parameter.device for parameter in pipe.parameters()}
        return Report(
            step=step,
            loss=sum(losses) / len(losses),
            samples_per_second=samples / seconds,
            tokens_per_second=self.num_tokens
            and self.num_tokens / self.num_samples * samples / seconds,
            bubble=timeline.step_bubble if timeline else None,
            busy=tuple(busy / makespan for busy in timeline.busy) if timeline else (),
            peak_memory=tuple(desk_of(pipe).everywhere(peak_memory(devices))),
        )


def fit(
    pipe: Pipeline,
    loader: Iterable[Any],
    optimizer: Optimizer | None,
    *,
    steps: int,
    folder: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    keep: int = 2,
    report_every: int = 10,
    scheduler: LRScheduler | None = None,
    max_norm: float | None = None,
    tensorboard: bool = False,
) -> list[Report]:
    """Train until `steps` steps are done; all ranks call it. Gives back the reports of this run.

    `loader` gives pairs (inputs, target), epoch after epoch; `optimizer` may be None on a rank that
    has no parameters. With a `folder`, checkpoints are written there every `save_every` steps while
    training goes on, and at the end; if it has one already, training goes on from it, with the bits
    that it would have had without a stop. A report is printed, and appended to
    `folder/metrics.jsonl`, by the first rank every `report_every` steps: reading the loss makes
    ranks wait for each other, so not after every step.

    A pipeline with an optimizer of its own, for which `optimizer` is None, streams: mini-batches
    follow each other without a barrier, and are all finished where a checkpoint is written.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> mse = torch.nn.functional.mse_loss
    >>> pipe = Pipeline(model, mse, num_ranks=2, num_microbatches=2, backend="serial")
    >>> optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    >>> data = [(torch.ones(4, 4), torch.zeros(4, 1))]
    >>> reports = fit(pipe, data, optimizer, steps=20)  # doctest: +ELLIPSIS
    step 10   loss ...
    step 20   loss ...
    >>> reports[1].loss < reports[0].loss
    True
    """
    sizes = {"steps": steps, "save_every": save_every, "report_every": report_every, "keep": keep}
    for name, size in sizes.items():
        check_size(name, size)
    run = Run(
        pipe,
        optimizer,
        scheduler,
        max_norm,
        Path(folder) if folder else None,
        save_every,
        report_every,
        keep,
    )
    _check(run, steps, tensorboard=tensorboard)
    done, position = run.resume()
    with ExitStack() as around:
        tell = desk_of(pipe).agreed(
            lambda: _listeners(around, run, steps, done, tensorboard=tensorboard)
        )
        with pipe._session.assembly.collectives.noted():
            return _train(run, loader, range(done + 1, steps + 1), position, tell)


def _check(run: Run, steps: int, *, tensorboard: bool) -> None:
    """On all ranks before anything is done, so that none of them waits for others in vain."""
    desk = desk_of(run.pipe)
    desk.agreed(lambda: _check_here(run, tensorboard=tensorboard))
    here = {
        "steps": steps,
        "save_every": run.save_every,
        "report_every": run.report_every,
        "keep": run.keep,
        "max_norm": run.max_norm,
        "folder": "given" if run.folder else "not given",
        "scheduler": run.scheduler_name,
    }
    for rank, there in enumerate(desk.everywhere(here)):
        for name, value in there.items():
            if value != here[name]:
                raise ModelError(
                    f"{name} is {here[name]} here and {value} on rank {rank}, but all ranks make "
                    "the same calls with the same arguments"
                )


def _check_here(run: Run, *, tensorboard: bool) -> None:
    if tensorboard and run.folder is None:
        raise ModelError("tensorboard is True, but there is no folder to write to: give folder=")
    if run.max_norm is not None and not run.max_norm > 0:
        raise ModelError(f"max_norm is {run.max_norm!r}, but has to be a number above 0")
    if run.pipe._session.optimizers is not None:
        theirs = {"optimizer": run.optimizer, "scheduler": run.scheduler, "max_norm": run.max_norm}
        for name, value in theirs.items():
            if value is not None:
                raise ModelError(
                    f"{name} was given to fit, but the pipeline steps its own optimizer: give "
                    f"{name} to Pipeline"
                )
    if run.optimizer is not None:
        check_parameters(run.optimizer, {place.tensor: place.name for place in places(run.pipe)})
    if run.scheduler is not None and run.scheduler.optimizer is not run.optimizer:
        raise ModelError("the scheduler is of another optimizer: make it for the one given to fit")


def _train(
    run: Run, loader: Iterable[Any], steps: range, position: Position, tell: Write
) -> list[Report]:
    data = batches(loader, run.pipe._session.seed, position)
    if run.pipe._session.optimizers is not None:
        return list(_streamed(run, data, steps, tell))
    reports = []
    interval = Interval()
    for step, batch in zip(steps, data, strict=False):
        is_last = step == steps[-1]
        if is_last or step % run.report_every == 0:
            with run.pipe.trace() as trace:
                interval.add(batch, run.step(batch))
            timeline = trace.timeline
            reports.append(interval.report(run.pipe, step, timeline))
            tell(reports[-1])
            interval = Interval()
        else:
            interval.add(batch, run.step(batch))
        if is_last or step % run.save_every == 0:
            run.save(step, batch.after, wait=is_last)
    return reports


def _streamed(run: Run, data: Iterator[Batch], steps: range, tell: Write) -> Iterator[Report]:
    """A stream up to each checkpoint, and another from there on."""
    interval = Interval()
    for part in _parts(steps, run.save_every):
        fed: deque[Batch] = deque()
        results = run.pipe.run(_noted(islice(data, len(part)), fed))
        batch: Batch | None = None
        for step, result in zip(part, results, strict=True):
            batch = fed.popleft()
            interval.add(batch, result)
            if step == steps[-1] or step % run.report_every == 0:
                report = interval.report(run.pipe, step, None)
                tell(report)
                yield report
                interval = Interval()
        assert batch is not None  # no part is empty
        run.save(part[-1], batch.after, wait=part[-1] == steps[-1])


def _parts(steps: range, length: int) -> Iterator[range]:
    """Up to the next multiple of `length` each, the last one to the end."""
    first = steps.start
    while first < steps.stop:
        behind = min(first - 1 - (first - 1) % length + length + 1, steps.stop)
        yield range(first, behind)
        first = behind


def _noted(data: Iterable[Batch], fed: deque[Batch]) -> Iterator[tuple[Any, Any]]:
    for batch in data:
        fed.append(batch)
        yield batch.inputs, batch.target


def _listeners(around: ExitStack, run: Run, steps: int, done: int, *, tensorboard: bool) -> Write:
    """The bar and the files, on the first rank; nobody elsewhere."""
    if not desk_of(run.pipe).is_first:
        return lambda _: None
    console = Console(highlight=False, markup=False)
    told = around.enter_context(progress(console, steps, done))
    if done >= steps:
        console.print(f"all {steps} steps are done")
    elif done:
        console.print(f"going on from step {done}")
    write = (
        around.enter_context(files(run.folder, done, tensorboard=tensorboard))
        if run.folder
        else None
    )

    def tell(report: Report) -> None:
        told(report.step, report.words())
        if write is not None:
            write(report)

    return tell
