"""Represent actions as integer tasks with dependencies, and compute their earliest times.

With integers, a hundred thousand actions are timed in a tenth of a second. The checker, the search
and the simulator all use `run_lanes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stageline.schedules.action import Action, Kind
from stageline.schedules.edges import Edge

NEVER = -1.0  # the end of a task that has not run


class TaskNumbering(NamedTuple):
    """The numbers of tasks: all F, then all I (or B), then all W; by stage, then micro-batch."""

    num_stages: int
    num_microbatches: int

    @property
    def num_tasks(self) -> int:
        return 3 * self.num_stages * self.num_microbatches

    def row(self, kind: Kind, stage: int) -> int:
        """Return the task of micro-batch 0; the tasks of the other micro-batches follow it."""
        return (PHASE[kind] * self.num_stages + stage) * self.num_microbatches

    def lane(self, actions: Iterable[Action]) -> list[int]:
        """Return the tasks of a rank's actions."""
        size, rows = self.num_microbatches, {kind: PHASE[kind] * self.num_stages for kind in PHASE}
        return [
            (rows[kind] + stage) * size + microbatch for stage, kind, microbatch, _, _ in actions
        ]


PHASE = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}


class Dependencies(NamedTuple):
    """The dependencies between tasks, stored once for each row of `size` similar tasks.

    A task depends on the tasks at given distances from it, and starts no earlier than a delay after
    each of them has ended. Stored for every single task, dependencies would take most of the memory
    of a large schedule.
    """

    size: int
    rows: list[tuple[tuple[int, float], ...]]  # (distance, delay)

    def of(self, task: int) -> list[tuple[int, float]]:
        """Return the tasks that must end before this one can start, each with its delay."""
        return [(task + distance, time) for distance, time in self.rows[task // self.size]]


def dependencies_of(
    numbering: TaskNumbering,
    edges: Iterable[Edge],
    delay: Callable[[int, int], float],
    lead: Callable[[int], float] = lambda _: 0.0,
) -> Dependencies:
    """Return the dependencies between compute actions.

    An F depends on the values that it reads, an I on the gradients of the values that its stage
    wrote, and a W on its own I. An I need not depend on its own F if other stages read its values:
    their F already do. It may start by `lead` before its gradients arrive.
    """
    row = numbering.row
    values: list[list[tuple[int, float]]] = [[] for _ in range(numbering.num_stages)]
    gradients: list[list[tuple[int, float]]] = [[] for _ in range(numbering.num_stages)]
    for writer, reader in edges:
        up = row(Kind.F, writer) - row(Kind.F, reader)
        values[reader].append((up, delay(writer, reader)))
        down = row(Kind.I, reader) - row(Kind.I, writer)
        gradients[writer].append((down, delay(reader, writer) - lead(writer)))
    own = (row(Kind.F, 0) - row(Kind.I, 0), 0.0)  # from any I to its F, from any W to its I
    rows = [*values, *(found or [own] for found in gradients), *([own] for _ in values)]
    return Dependencies(numbering.num_microbatches, [tuple(waits) for waits in rows])


class LaneTimes(NamedTuple):
    """The start and end of each task (`NEVER` if it did not run), and each lane's progress."""

    starts: list[float]
    ends: list[float]
    progress: list[int]  # number of tasks that ran

    def is_complete(self, lanes: Sequence[Sequence[int]]) -> bool:
        return all(done == len(lane) for done, lane in zip(self.progress, lanes, strict=True))


def run_lanes(
    lanes: Sequence[Sequence[int]],
    durations: Sequence[float],
    dependencies: Dependencies,
    resume_from: LaneTimes | None = None,
) -> LaneTimes:
    """Run every lane in its own order, each task as early as its dependencies allow.

    A lane whose next task has an unfinished dependency is parked, and woken when that task ends.
    Each dependency is examined once, so the time is linear. Lanes that are still parked at the end
    are deadlocked. `resume_from` is a partial run to be continued; its lists are modified.
    """
    if resume_from is None:
        resume_from = LaneTimes(
            [NEVER] * len(durations), [NEVER] * len(durations), [0] * len(lanes)
        )
    starts, ends, progress = resume_from
    size, rows = dependencies
    parked: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))[::-1]
    while awake:
        lane = awake.pop()
        tasks, position = lanes[lane], progress[lane]
        now = ends[tasks[position - 1]] if position else 0.0
        while position < len(tasks):
            task = tasks[position]
            start = now
            for distance, time in rows[task // size]:
                end = ends[task + distance]
                if end < 0.0:
                    parked.setdefault(task + distance, []).append(lane)
                    break
                if end + time > start:
                    start = end + time
            else:
                starts[task] = start
                ends[task] = now = start + durations[task]
                position += 1
                if task in parked:
                    awake += parked.pop(task)
                continue
            break
        progress[lane] = position
    return resume_from
