"""What a rule is, and how a broken one becomes an error that shows the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from stageline.errors import ScheduleError
from stageline.schedules.action import Action
from stageline.schedules.grid import Cell, marked_grid
from stageline.schedules.precedence import NEVER, Run, Waits

Facts = TypeVar("Facts")
Rows = Sequence[Sequence[Action]]


class Offence(NamedTuple):
    """Where a rule is broken, and the words for its message."""

    cells: Sequence[Cell]
    words: dict[str, Any]


class Rule(NamedTuple, Generic[Facts]):
    """`find` yields what breaks the rule; it may take for granted that the rules above it hold."""

    name: str
    find: Callable[[Facts], Iterator[Offence]]
    message: str


def enforce(rules: Sequence[Rule[Facts]], facts: Facts, rows: Rows) -> None:
    """Raise for the first rule that is broken, with its first offence marked in the grid."""
    for rule in rules:
        for offence in rule.find(facts):
            message = rule.message.format(**offence.words)
            raise ScheduleError(f"{message}\n{marked_grid(rows, offence.cells)}")


def waiting_for_each_other(
    rows: Rows, lanes: Sequence[Sequence[int]], waits: Waits, run: Run
) -> Iterator[Offence]:
    """The circle in which ranks wait, if the run did not come to its end."""
    stuck = [lane for lane in range(len(rows)) if run.progress[lane] < len(lanes[lane])]
    if not stuck:
        return
    cells = {task: (lane, i) for lane, tasks in enumerate(lanes) for i, task in enumerate(tasks)}

    def awaited(lane: int) -> int:
        """What a lane waits for; if that is a message, what the message waits for."""
        head = lanes[lane][run.progress[lane]]
        task = next(task for task, _ in waits.of(head) if run.ends[task] == NEVER)
        other = cells[task][0]
        return task if other < len(rows) else awaited(other)

    circle: list[int] = []
    lane, missing = stuck[0], {}
    while lane not in circle:
        circle.append(lane)
        missing[lane] = awaited(lane)
        lane = cells[missing[lane]][0]
    circle = circle[circle.index(lane) :]

    def name(cell: Cell) -> Action:
        return rows[cell[0]][cell[1]]

    steps = [f"{name((r, run.progress[r]))} for {name(cells[missing[r]])}" for r in circle]
    several = f"ranks {', '.join(map(str, sorted(circle)))} wait for each other"
    who = several if len(circle) > 1 else f"rank {circle[0]} waits for itself"
    words = {"who": who, "cycle": ", ".join(steps)}
    yield Offence([(r, run.progress[r]) for r in circle], words)
