"""`pipe.run`: the results of mini-batches that follow each other without a barrier."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

from stageline.errors import ModelError
from stageline.runtime.batches.cut_batch import streamed_batch
from stageline.runtime.batches.result import StepResult, broadcast_results
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.engine.session import Session
from stageline.runtime.optimizers.divergence import DivergenceMonitor

StepResults = Generator[StepResult, None, None]


def run(session: Session, loader: Iterable[tuple[Any, Any]]) -> StepResults:
    """Return the results of a loader's mini-batches, as they come."""
    if session.optimizers is None:
        raise ModelError(
            "run was called, but the optimizer is not the pipeline's: give it one with "
            "optimizer_fn=lambda params: SGD(params, lr=0.1), or use step"
        )
    session.check_idle()
    return _results(session, _fed(session, loader))


def _fed(session: Session, loader: Iterable[tuple[Any, Any]]) -> Iterator[MiniBatch]:
    """Yield mini-batches of a loader; other ranks learn of it if the loader raises."""
    with session.assembly.collectives.reporting():
        for batch in loader:
            minibatch = streamed_batch(session, batch)
            session.num_steps += 1
            yield minibatch


def _results(session: Session, minibatches: Iterator[MiniBatch]) -> StepResults:
    assembly = session.assembly
    monitor, unseen = DivergenceMonitor(), deque[tuple[int, StepResult]]()
    with closing(session.stream(minibatches)) as done:
        for minibatch in done:
            result = broadcast_results(minibatch, assembly.layout.schedule, assembly.collectives)
            if assembly.is_asynchronous:
                unseen.append((minibatch.number, result))
            # so late that no rank has to wait for another's results
            if len(unseen) > session.ahead + 1:
                _warn(monitor, *unseen.popleft())
            yield result
        for number, result in unseen:
            _warn(monitor, number, result)


def _warn(monitor: DivergenceMonitor, number: int, result: StepResult) -> None:
    """Warn where the results of a stream are used."""
    if warning := monitor.check(number, result.results):
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
