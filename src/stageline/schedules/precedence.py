"""What must end before what can start, and the earliest time at which everything can run.

Actions become integers, so that a hundred thousand of them are timed in a tenth of a second. The
checker, the search and the simulator all ask the one question that `run_lanes` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stageline.schedules.action import Action, Kind
from stageline.schedules.edges import Edge

NEVER = -1.0  # the end of a task that has not run


class Numbering(NamedTuple):
    """Tasks as integers: all F, then all I (or B), then all W; by stage, then by micro-batch."""

    num_stages: int
    num_microbatches: int

    @property
    def num_tasks(self) -> int:
        return 3 * self.num_stages * self.num_microbatches

    def row(self, kind: Kind, stage: int) -> int:
        """The task of micro-batch 0; the others follow it."""
        return (PHASE[kind] * self.num_stages + stage) * self.num_microbatches

    def lane(self, actions: Iterable[Action]) -> list[int]:
        size, rows = self.num_microbatches, {kind: PHASE[kind] * self.num_stages for kind in PHASE}
        return [
            (rows[kind] + stage) * size + microbatch for stage, kind, microbatch, _, _ in actions
        ]


PHASE = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}


class Waits(NamedTuple):
    """What tasks wait for, told once for each row of `size` tasks that are alike.

    A task waits for the tasks at some distances from it, and for a delay after each has ended. Told
    for every task by itself, this would be most of the memory of a large schedule.
    """

    size: int
    rows: list[tuple[tuple[int, float], ...]]  # (distance, delay)

    def of(self, task: int) -> list[tuple[int, float]]:
        """The tasks that must end before this one can start, each with its delay."""
        return [(task + distance, time) for distance, time in self.rows[task // self.size]]


def waits_of(
    numbering: Numbering, edges: Iterable[Edge], delay: Callable[[int, int], float]
) -> Waits:
    """F waits for the values it reads, I for the gradients of what it wrote, W for its own I.

    An I whose stage has readers need not wait for its own F: the readers' F did.
    """
    row = numbering.row
    values: list[list[tuple[int, float]]] = [[] for _ in range(numbering.num_stages)]
    gradients: list[list[tuple[int, float]]] = [[] for _ in range(numbering.num_stages)]
    for writer, reader in edges:
        up = row(Kind.F, writer) - row(Kind.F, reader)
        values[reader].append((up, delay(writer, reader)))
        down = row(Kind.I, reader) - row(Kind.I, writer)
        gradients[writer].append((down, delay(reader, writer)))
    own = (row(Kind.F, 0) - row(Kind.I, 0), 0.0)  # from any I to its F, from any W to its I
    rows = [*values, *(found or [own] for found in gradients), *([own] for _ in values)]
    return Waits(numbering.num_microbatches, [tuple(waits) for waits in rows])


class Run(NamedTuple):
    """When each task started and ended (`NEVER` if it did not), and how far each lane came."""

    starts: list[float]
    ends: list[float]
    progress: list[int]

    def is_complete(self, lanes: Sequence[Sequence[int]]) -> bool:
        return all(done == len(lane) for done, lane in zip(self.progress, lanes, strict=True))


def run_lanes(
    lanes: Sequence[Sequence[int]],
    durations: Sequence[float],
    waits: Waits,
    begun: Run | None = None,
) -> Run:
    """Run every lane in its own order, each task as early as its waits allow.

    A lane that meets an unfinished task is parked there and woken when that task ends: every task
    is looked at once per wait, so the time is linear. What is parked at the end waits for ever. A
    run that has `begun` is carried on, in the lists that it holds.
    """
    if begun is None:
        begun = Run([NEVER] * len(durations), [NEVER] * len(durations), [0] * len(lanes))
    starts, ends, progress = begun
    size, rows = waits
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
    return begun
