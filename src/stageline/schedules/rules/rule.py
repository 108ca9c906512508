"""Define rules of schedules and programs, and raise an error that shows where one is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from stageline.errors import ScheduleError
from stageline.schedules.action import Action
from stageline.schedules.marked_grid import Cell, marked_grid
from stageline.schedules.task_graph import NEVER, Dependencies, LaneTimes

FactsT = TypeVar("FactsT")
Rows = Sequence[Sequence[Action]]


class Violation(NamedTuple):
    """The cells in which a rule is broken, and the values for its message."""

    cells: Sequence[Cell]
    values: dict[str, Any]


class Rule(NamedTuple, Generic[FactsT]):
    """A rule; its `find` yields the violations, and may assume that the rules above it hold."""

    name: str
    find: Callable[[FactsT], Iterator[Violation]]
    message: str


def enforce(rules: Sequence[Rule[FactsT]], facts: FactsT, rows: Rows) -> None:
    """Raise `ScheduleError` for the first broken rule, with its first violation marked."""
    for rule in rules:
        for violation in rule.find(facts):
            message = rule.message.format(**violation.values)
            raise ScheduleError(f"{message}\n{marked_grid(rows, violation.cells)}")


def waiting_for_each_other(
    rows: Rows, lanes: Sequence[Sequence[int]], dependencies: Dependencies, run: LaneTimes
) -> Iterator[Violation]:
    """Yield the cycle of ranks that wait for each other, if the run did not complete."""
    stuck = [lane for lane in range(len(rows)) if run.progress[lane] < len(lanes[lane])]
    if not stuck:
        return
    cells = {task: (lane, i) for lane, tasks in enumerate(lanes) for i, task in enumerate(tasks)}

    def awaited(lane: int) -> int:
        """Return the task that a lane waits for; for a message, what that message waits for."""
        task = missing_task(lanes[lane][run.progress[lane]], dependencies, run)
        other = cells[task][0]
        return task if other < len(rows) else awaited(other)

    cycle = cycle_from(stuck[0], lambda lane: cells[awaited(lane)][0])

    def name(cell: Cell) -> Action:
        return rows[cell[0]][cell[1]]

    heads = [(rank, run.progress[rank]) for rank in cycle]
    steps = [f"{name(head)} for {name(cells[awaited(head[0])])}" for head in heads]
    yield circular_wait(heads, steps)


def missing_task(task: int, dependencies: Dependencies, run: LaneTimes) -> int:
    """Return the first of the tasks that a task needs which has not run."""
    return next(other for other, _ in dependencies.of(task) if run.ends[other] == NEVER)


def cycle_from(first: int, following: Callable[[int], int]) -> list[int]:
    """Return the cycle that is reached by following from one lane to the next."""
    seen: dict[int, None] = {}
    lane = first
    while lane not in seen:
        seen[lane] = None
        lane = following(lane)
    path = list(seen)
    return path[path.index(lane) :]


def circular_wait(cells: Sequence[Cell], steps: Sequence[str]) -> Violation:
    """Return the violation of actions that wait for each other, each with what it waits for."""
    ranks = sorted({rank for rank, _ in cells})
    several = f"ranks {', '.join(map(str, ranks))} wait for each other"
    who = several if len(ranks) > 1 else f"rank {ranks[0]} waits for itself"
    return Violation(cells, {"who": who, "cycle": ", ".join(steps)})
