"""How much the search may spend, in tasks and not in seconds: the same call spends the same.

A clock would make the result depend on what else the machine does. Ranks that search each for
itself would end up with different schedules, and wait for each other for ever.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

TASKS_PER_SECOND = 500_000  # timed by one core of a small machine, and that with caution
NUM_TIMINGS = 700  # without a time budget: as much as timing so many orders costs ...
MOST_SECONDS = 8.0  # ... but not more than this
SILENT_SECONDS = 1.0


class Budget:
    """Counts down; shows a progress bar on a terminal once a second has passed."""

    def __init__(self, num_tasks: float) -> None:
        self.num_tasks, self.num_spent = num_tasks, 0.0
        self.started = time.monotonic()
        self.bar: tuple[Progress, TaskID] | None = None

    @staticmethod
    def of(tasks_per_order: int, time_budget: float | None) -> Budget:
        if time_budget is not None:
            return Budget(time_budget * TASKS_PER_SECOND)
        return Budget(min(NUM_TIMINGS * tasks_per_order, MOST_SECONDS * TASKS_PER_SECOND))

    @property
    def is_spent(self) -> bool:
        return self.num_spent >= self.num_tasks

    def may_spend(self, num_tasks: int) -> bool:
        """Whether there was anything left to spend; it is spent then."""
        if self.is_spent:
            return False
        self.num_spent += num_tasks
        self._show()
        return True

    def _show(self) -> None:
        if self.bar is None:
            if time.monotonic() - self.started < SILENT_SECONDS or not sys.stderr.isatty():
                return
            from rich.console import Console  # noqa: PLC0415  0.05 s that a short search saves
            from rich.progress import Progress  # noqa: PLC0415

            progress = Progress(console=Console(stderr=True), transient=True)
            progress.start()
            self.bar = progress, progress.add_task("searching a schedule", total=self.num_tasks)
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
