"""Limit the work of a search by a number of tasks, not by a clock, so that it is reproducible.

With a clock, the result would depend on the load of the machine. Ranks that search independently
would find different schedules, and wait for each other forever.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

TASKS_PER_SECOND = 500_000  # a cautious estimate of what one core of a small machine times
NUM_TIMINGS = 700  # without a time budget, the work of timing this many orders ...
MOST_SECONDS = 8.0  # ... but at most this
SILENT_SECONDS = 1.0


class SearchBudget:
    """A limit on the tasks to time; shows a progress bar on a terminal after one second.

    With `watch`, it calls that with the share that is spent instead.
    """

    def __init__(self, num_tasks: float, watch: Callable[[float], None] | None = None) -> None:
        self.num_tasks, self.num_spent = num_tasks, 0.0
        self.watch = watch
        self.started = time.monotonic()
        self.bar: tuple[Progress, TaskID] | None = None

    @staticmethod
    def of(
        tasks_per_order: int,
        time_budget: float | None,
        watch: Callable[[float], None] | None = None,
    ) -> SearchBudget:
        """Return the budget for `time_budget` seconds, or the default one."""
        if time_budget is not None:
            return SearchBudget(time_budget * TASKS_PER_SECOND, watch)
        most = MOST_SECONDS * TASKS_PER_SECOND
        return SearchBudget(min(NUM_TIMINGS * tasks_per_order, most), watch)

    @property
    def is_exhausted(self) -> bool:
        return self.num_spent >= self.num_tasks

    def spend(self, num_tasks: int) -> bool:
        """Spend from the budget; return False, and spend nothing, if it is exhausted."""
        if self.is_exhausted:
            return False
        self.num_spent += num_tasks
        if self.watch is None:
            self._show()
        else:
            self.watch(min(1.0, self.num_spent / self.num_tasks))
        return True

    def _show(self) -> None:
        if self.bar is None:
            if time.monotonic() - self.started < SILENT_SECONDS or not sys.stderr.isatty():
                return
            from rich.console import Console  # noqa: PLC0415  takes 0.05 s, which a short search need not spend
            from rich.progress import Progress  # noqa: PLC0415

            progress = Progress(console=Console(stderr=True), transient=True)
            progress.start()
            self.bar = progress, progress.add_task("searching for a schedule", total=self.num_tasks)
        progress, task = self.bar
        progress.update(task, completed=self.num_spent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar[0].stop()
