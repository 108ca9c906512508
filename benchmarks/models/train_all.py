"""Train all models in all ways: in threads and in processes side by side, each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Event
from time import perf_counter
from typing import NamedTuple

from benchmarks.models.catalogue import make_case
from benchmarks.models.combination import (
    BACKENDS,
    RANKS,
    Combination,
    Report,
    combinations,
    quick_combinations,
    train_and_compare,
)
from benchmarks.models.results import ModelResult, Results
from benchmarks.models.torch_tracer import Traced, trace_with_torch
from benchmarks.models.worker_group import Failure, WorkerGroup
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LIMIT = 120.0  # seconds for one combination; it takes one or two
TORCH_LIMIT = 90.0  # seconds for torch's pipeline()


class Names(NamedTuple):
    """The names that a model has itself, and the ways to train it."""

    parameters: frozenset[str]
    state: frozenset[str]
    combinations: list[Combination]


def train_all(names: Sequence[str], results: Results, console: Console, *, quick: bool) -> None:
    """Fill in what the results lack."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        stop = Event()
        lanes = [Lane(each, results, progress, len(names), stop, quick=quick) for each in BACKENDS]
        with ThreadPoolExecutor(len(lanes)) as pool:
            try:
                for done in [pool.submit(lane.run, names) for lane in lanes]:
                    done.result()
            finally:
                stop.set()


class Lane:
    """Trains one model after another on one backend. State: the processes that do it."""

    def __init__(
        self,
        backend: str,
        results: Results,
        progress: Progress,
        total: int,
        stop: Event,
        *,
        quick: bool,
    ) -> None:
        self.backend, self.results, self.stop, self.quick = backend, results, stop, quick
        self.progress, self.bar = progress, progress.add_task(backend, total=total)
        sizes = RANKS if backend == "processes" else (1,)
        self.groups = {size: WorkerGroup(size) for size in sizes}

    def run(self, names: Sequence[str]) -> None:
        with ExitStack() as stack:
            for group in self.groups.values():
                stack.enter_context(closing(group))
            for number, name in enumerate(names):
                if self.stop.is_set():
                    return
                self._train(name, number)
                if self.backend == "threads":
                    self._trace(name)
                self.progress.advance(self.bar)

    def _train(self, name: str, number: int) -> None:
        found = self.results.of(name)
        (own,) = self.groups[min(self.groups)].run(
            own_names, name, number, self.quick, seconds=LIMIT
        )[:1]
        if isinstance(own, Failure):
            found.faults["make the model"] = own.reason
            return
        for combination in own.combinations:
            if self.stop.is_set():  # an interrupt, or the other lane has failed
                return
            if combination.backend == self.backend and found.lacks(combination):
                self._show(f"{name}: {combination}")
                self._compare(name, combination, own, found)
                self.results.save()

    def _compare(self, name: str, combination: Combination, own: Names, found: ModelResult) -> None:
        start = perf_counter()
        size = combination.num_ranks if self.backend == "processes" else 1
        reports = self.groups[size].run(train_and_compare, name, combination, seconds=LIMIT)
        failures = [reply.reason for reply in reports if isinstance(reply, Failure)]
        if not failures:
            found.num_layers = reports[0].num_layers
            found.names = found.names or wrong_names(reports, own)
            failures = [report.fault for report in reports if report.fault]
        found.faults[str(combination)] = failures[0] if failures else ""
        found.seconds += perf_counter() - start
        if failures:
            self.progress.console.print(
                f"{name}: {combination}: {failures[0]}", style="red", markup=False, highlight=False
            )

    def _trace(self, name: str) -> None:
        found = self.results.of(name)
        if found.torch is None and not self.stop.is_set():
            self._show(f"{name}: torch's pipeline()")
            (reply,) = self.groups[1].run(trace_with_torch, name, seconds=TORCH_LIMIT)
            is_failure = isinstance(reply, Failure)
            found.torch = Traced(not_traced=reply.reason) if is_failure else reply
            self.results.save()

    def _show(self, text: str) -> None:
        self.progress.update(self.bar, description=f"{self.backend:9} {text}")


def own_names(name: str, number: int, quick: bool) -> Names:
    """Return a model's own names, and the ways to train it."""
    model = make_case(name).model
    ways = quick_combinations(name, number) if quick else combinations(name)
    parameters = frozenset(n for n, _ in model.named_parameters())
    return Names(parameters, frozenset(model.state_dict()), ways)


def wrong_names(reports: Sequence[Report], own: Names) -> str:
    """Return a name that the processes together have too many or too few, or nothing."""
    parameters = frozenset(n for report in reports for n in report.parameters)
    state = frozenset(n for report in reports for n in report.state)
    return next(iter(sorted((parameters ^ own.parameters) | (state ^ own.state))), "")
