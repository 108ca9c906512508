"""The actions of a schedule as arrays, rank by rank: made once, and timed for many costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stageline.report.memory import version_changes
from stageline.schedules.action import Kind
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import Program
from stageline.schedules.schedule import Schedule
from stageline.schedules.task_graph import PHASE, TaskNumbering

KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.STEP)  # numbered in this order, also on the page
CODE = {kind: code for code, kind in enumerate(KINDS)}
NOTHING = -1  # an action that waits for no other
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """The actions of a schedule, in its order; `verdict` is what the checker says against it."""

    schedule: Schedule
    verdict: str = ""

    @property
    def num_actions(self) -> int:
        return int(self.row_starts[-1])

    @cached_property
    def row_starts(self) -> Integers:
        """Return where each rank's actions begin, and where the last ones end."""
        return np.cumsum([0, *map(len, self.schedule.actions)])

    @property
    def rows(self) -> list[slice]:
        """Return the actions of each rank."""
        ends = self.row_starts.tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    @cached_property
    def kinds(self) -> Integers:
        """Return the kind of each action, as its place in `KINDS`."""
        return np.array([CODE[a.kind] for row in self.schedule.actions for a in row], np.int64)

    @cached_property
    def stages(self) -> Integers:
        return np.array([a.stage for row in self.schedule.actions for a in row], np.int64)

    @cached_property
    def microbatches(self) -> Integers:
        return np.array([a.microbatch for row in self.schedule.actions for a in row], np.int64)

    @cached_property
    def copies(self) -> Integers:
        """Return 1 for each action that copies weights, and -1 for each that frees a copy."""
        changes = map(version_changes, self.schedule.actions)
        return np.array([change for row in changes for change in row], np.int64)

    @cached_property
    def numbering(self) -> TaskNumbering:
        return TaskNumbering(self.schedule.num_stages, self.schedule.total_microbatches)

    @cached_property
    def tasks(self) -> Integers:
        """Return the task of each action; an optimizer step has none."""
        phases = np.array([PHASE.get(kind, 0) for kind in KINDS])[self.kinds]
        stages = phases * self.numbering.num_stages + self.stages
        tasks = stages * self.numbering.num_microbatches + self.microbatches
        return np.where(self.kinds == CODE[Kind.STEP], NOTHING, tasks)

    @cached_property
    def lanes(self) -> list[list[int]]:
        """Return the tasks of each rank."""
        return [self.tasks[row].tolist() for row in self.rows]

    @cached_property
    def waits_for(self) -> Integers:
        """Return the action whose result each action needs, or `NOTHING`.

        F needs the previous stage's F, I and B the next stage's, or their own F on the last stage,
        and W its own I.
        """
        num_stages, size = self.numbering.num_stages, self.numbering.num_microbatches
        is_first, is_last = self.stages == 0, self.stages == num_stages - 1
        is_forward = (self.kinds == CODE[Kind.F]) | (self.kinds == CODE[Kind.STEP])
        is_weight = self.kinds == CODE[Kind.W]
        own = self.tasks - num_stages * size
        needed = np.where(
            is_forward,
            np.where(is_first, NOTHING, self.tasks - size),
            np.where(is_weight | is_last, own, self.tasks + size),
        )
        needed[self.kinds == CODE[Kind.STEP]] = NOTHING
        return np.where(needed == NOTHING, NOTHING, self._action_of_task[needed])

    @cached_property
    def _action_of_task(self) -> Integers:
        found = np.full(self.numbering.num_tasks, NOTHING)
        is_task = self.tasks != NOTHING
        found[self.tasks[is_task]] = np.flatnonzero(is_task)
        return found

    @cached_property
    def program(self) -> Program:
        """Return the program of the schedule, which has its messages and optimizer steps."""
        return lower(self.schedule)
