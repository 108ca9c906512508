"""sl.fit: train with reports and checkpoints, and resume after an interruption."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.checkpoint.group import checkpoint_group, report_errors
from stageline.pipeline import Pipeline, session_of
from stageline.training.data import Batch, DataPosition, batches
from stageline.training.metrics import Report, ReportInterval
from stageline.training.run import TrainingRun
from stageline.training.run_log import RunLog, open_log


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
    """Train until `steps` steps are done and return the reports; all ranks call it.

    `loader` yields pairs (inputs, target), epoch after epoch, or whole batches, as `pipe.step`
    takes them, if the model computes its own loss. `optimizer` is None on ranks without
    parameters, and for a pipeline with optimizers of its own: then mini-batches follow each other
    without a barrier, except where a checkpoint is saved.

    With a `folder`, checkpoints are saved there every `save_every` steps in the background, and at
    the end. If it has one already, training resumes from it with the bits of a run that was never
    interrupted. Every `report_every` steps the first rank prints a report and appends it to
    `folder/metrics.jsonl`; reading the loss makes ranks wait for each other. Beside it are the
    run's configuration, its last recorded steps and its events, for `stageline report folder`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> mse = torch.nn.functional.mse_loss
    >>> pipe = Pipeline(model, mse, num_ranks=2, num_microbatches=2, backend="serial")
    >>> data = [(torch.ones(4, 4), torch.zeros(4, 1))]
    >>> reports = fit(pipe, data, torch.optim.SGD(pipe.parameters(), 0.1), steps=20)
    ... # doctest: +ELLIPSIS
    step 10   loss ...
    step 20   loss ...
    >>> reports[1].loss < reports[0].loss
    True
    """
    place = Path(folder) if folder else None
    every = (save_every, report_every, keep)
    run = TrainingRun(pipe, optimizer, scheduler, steps, max_norm, place, *every, tensorboard)
    run.check()
    return _fit(run, loader)


def _fit(run: TrainingRun, loader: Iterable[Any]) -> list[Report]:
    done, position = run.resume()
    with ExitStack() as stack:
        log = checkpoint_group(run.pipe).run(lambda: open_log(stack, run, done))
        with report_errors(run.pipe):
            return _train(run, loader, range(done + 1, run.steps + 1), position, log)


def _train(
    run: TrainingRun, loader: Iterable[Any], steps: range, start: DataPosition, log: RunLog
) -> list[Report]:
    interval = ReportInterval()
    session = session_of(run.pipe)
    has_own_loss = session.assembly.settings.has_own_loss
    found = batches(loader, session.seed, start, has_own_loss=has_own_loss)
    data = interval.timed("data", found)
    if run.has_own_optimizers:
        return list(_train_stream(run, data, steps, log, interval))
    reports = []
    for step, batch in zip(steps, data, strict=False):
        is_last = step == steps[-1]
        is_reported = is_last or step % run.report_every == 0
        with run.pipe.trace() if is_reported else nullcontext() as trace:
            result = run.pipe.step(batch.inputs, batch.target)
        with interval.timing("optimizer"):
            run.update()
        interval.add(batch, result)
        log.step_done(step)
        if trace is not None:
            reports.append(interval.report(run.pipe, step, trace.timeline))
            log.report(reports[-1], trace.timeline)
            interval.restart()
        if is_last or step % run.save_every == 0:
            with interval.timing("save"):
                log.saves(step, run.save(step, batch.after, wait=is_last))
    return reports


def _train_stream(
    run: TrainingRun, data: Iterator[Batch], steps: range, log: RunLog, interval: ReportInterval
) -> Iterator[Report]:
    """Run one stream up to each checkpoint."""
    for part in _split_at_multiples(steps, run.save_every):
        fed: deque[Batch] = deque()
        results = run.pipe.run(_pairs(islice(data, len(part)), fed))
        batch: Batch | None = None
        for step, result in zip(part, results, strict=True):
            batch = fed.popleft()
            interval.add(batch, result)
            log.step_done(step)
            if step == steps[-1] or step % run.report_every == 0:
                report = interval.report(run.pipe, step, None)
                log.report(report, None)
                yield report
                interval.restart()
        assert batch is not None  # no part is empty
        with interval.timing("save"):
            log.saves(part[-1], run.save(part[-1], batch.after, wait=part[-1] == steps[-1]))


def _split_at_multiples(steps: range, length: int) -> Iterator[range]:
    """Split a range after each multiple of `length`."""
    first = steps.start
    while first < steps.stop:
        stop = min(first - 1 - (first - 1) % length + length + 1, steps.stop)
        yield range(first, stop)
        first = stop


def _pairs(data: Iterable[Batch], fed: deque[Batch]) -> Iterator[tuple[Any, Any]]:
    """Yield (inputs, target) of each batch, and append the batch to `fed`."""
    for batch in data:
        fed.append(batch)
        yield batch.inputs, batch.target
