"""A program: a schedule with its sends, receives, reductions and optimizer steps written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stageline.schedules import csv
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.edges import Edge, Routes
from stageline.schedules.placement import Placement
from stageline.schedules.precedence import Waits
from stageline.schedules.schedule import Rows, Schedule

TWIN = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


@dataclass(frozen=True)
class Program:
    """What every rank does in one step, in order; the simulator and the runtime both execute it.

    A send hands its message over and goes on. A receive only asks for a message; the action that
    needs it waits for it. Messages from one rank to another are asked for in the order of sends.
    A reduction starts where it stands and runs beside what follows, until its optimizer step.
    """

    actions: Rows
    placement: Placement
    edges: tuple[Edge, ...]
    name: str = field(default="", compare=False)

    def to_csv(self, path: str | Path) -> None:
        """One row per rank, in the form that torch calls compute_comms."""
        Path(path).write_text(csv.render(self.actions), encoding="utf-8")

    @cached_property
    def schedule(self) -> Schedule:
        """The compute actions alone."""
        rows = tuple(tuple(a for a in row if a.kind in COMPUTE) for row in self.actions)
        return Schedule(rows, self.placement, self.name)

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.edges, self.placement)


def twin(send: Action) -> Action:
    """The receive at the other end of a send."""
    return Action(send.peer, TWIN[send.kind], send.microbatch, send.stage)


class Tasks(NamedTuple):
    """A program as numbered tasks on lanes, for `run_lanes`.

    The first lanes are the ranks. Then come a lane for each pair of ranks, on which messages follow
    each other, and a lane for each rank's reductions.
    """

    numbers: dict[Action, int]  # a B goes by the name of its I as well
    background: dict[Action, int]  # messages by their send, reductions by their start
    lanes: list[list[int]]
    waits: Waits

    @property
    def num_tasks(self) -> int:
        return len(self.waits.rows)


def program_tasks(
    program: Program, delay: Callable[[Action], float], *, rendezvous: bool = False
) -> Tasks:
    """With `rendezvous`, a rank stays in its send until the other end has asked for the message."""
    actions = [action for row in program.actions for action in row]
    numbers = {action: number for number, action in enumerate(actions)}
    lanes = [[numbers[action] for action in row] for row in program.actions]
    numbers |= {
        Action(a.stage, Kind.I, a.microbatch): numbers[a] for a in actions if a.kind is Kind.B
    }
    flying = [a for a in actions if a.kind in TWIN or a.kind is Kind.REDUCE_GRAD]
    background = {action: len(actions) + i for i, action in enumerate(flying)}

    def waits(action: Action) -> Iterator[tuple[int, float]]:
        if action.kind in COMPUTE:
            yield from ((background[a], delay(a)) for a in program.routes.awaited(action))
        yield from ((numbers[a], 0.0) for a in _needs(program.routes, action))
        if rendezvous and action.kind in TWIN:
            yield numbers[twin(action)], 0.0
        if action.kind is Kind.STEP:
            yield background[Action(action.stage, Kind.REDUCE_GRAD)], 0.0

    both_ends = [[a, twin(a)] if a.kind in TWIN else [a] for a in flying]
    waits_of_all = [list(waits(action)) for action in actions]
    waits_of_all += [[(numbers[end], 0.0) for end in ends] for ends in both_ends]
    rows = [tuple((b - task, time) for b, time in w) for task, w in enumerate(waits_of_all)]
    lanes += _background_lanes(program, background)
    return Tasks(numbers, background, lanes, Waits(1, rows))


def _needs(routes: Routes, action: Action) -> Iterator[Action]:
    """What must have run on the same rank; a gradient goes by the name of I, be it I or B."""
    stage, kind, microbatch, _ = action
    if kind is Kind.F:
        near = (s for s in routes.writers[stage] if not routes.crosses(s, stage))
        yield from (Action(s, Kind.F, microbatch) for s in near)
    elif kind is Kind.I or kind is Kind.B:
        near = (s for s in routes.readers[stage] if not routes.crosses(s, stage))
        yield from (Action(s, Kind.I, microbatch) for s in near)
        yield Action(stage, Kind.F, microbatch)
    elif kind is Kind.SEND_F:
        yield Action(stage, Kind.F, microbatch)
    elif kind is Kind.SEND_B or kind is Kind.W:
        yield Action(stage, Kind.I, microbatch)


def _background_lanes(program: Program, background: dict[Action, int]) -> list[list[int]]:
    lanes: dict[tuple[int, int | None], list[int]] = {}
    for action, number in background.items():
        target = program.placement[action.peer] if action.kind in TWIN else None
        lanes.setdefault((program.placement[action.stage], target), []).append(number)
    return list(lanes.values())
