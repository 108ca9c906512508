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
        head = lanes[lane][run.progress[lane]]
        task = next(task for task, _ in dependencies.of(head) if run.ends[task] == NEVER)
        other = cells[task][0]
        return task if other < len(rows) else awaited(other)

    cycle: list[int] = []
    lane, missing = stuck[0], {}
    while lane not in cycle:
        cycle.append(lane)
        missing[lane] = awaited(lane)
        lane = cells[missing[lane]][0]
    cycle = cycle[cycle.index(lane) :]

    def name(cell: Cell) -> Action:
        return rows[cell[0]][cell[1]]

    steps = [f"{name((r, run.progress[r]))} for {name(cells[missing[r]])}" for r in cycle]
    several = f"ranks {', '.join(map(str, sorted(cycle)))} wait for each other"
    who = several if len(cycle) > 1 else f"rank {cycle[0]} waits for itself"
    values = {"who": who, "cycle": ", ".join(steps)}
    yield Violation([(r, run.progress[r]) for r in cycle], values)
