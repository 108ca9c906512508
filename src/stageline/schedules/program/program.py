"""A program: a schedule with its sends, receives, reductions and optimizer steps written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stageline.errors import ScheduleError
from stageline.files import write_text
from stageline.schedules import csv
from stageline.schedules.action import COMPUTE, NO_VERSION, Action, Kind
from stageline.schedules.edges import Edge, Routes
from stageline.schedules.placement import Placement, Replicas, ranks_of
from stageline.schedules.precedence import Waits
from stageline.schedules.schedule import Rows, Schedule, as_numbers, as_rows, is_scheduled

TWIN = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


class Epilogue(NamedTuple):
    """What a model needs at the end of each mini-batch, beside reductions and optimizer steps."""

    reduces_tied: bool = False  # several layers share a weight
    stages_with_stats: tuple[int, ...] = ()  # stages whose running statistics are updated
    clips: bool = False  # gradients are clipped before the optimizer steps

    def actions(self, stages: Iterable[int], version: int = NO_VERSION) -> Iterator[Action]:
        """Yield what a rank does before its optimizer steps, in order.

        Tied weights and clipping concern a whole rank, and are written at its first stage.
        """
        stages = sorted(stages)
        if self.reduces_tied and stages:
            yield Action(stages[0], Kind.REDUCE_TIED, version=version)
        for stage in stages:
            if stage in self.stages_with_stats:
                yield Action(stage, Kind.UPDATE_STATS, version=version)
        if self.clips and stages:
            yield Action(stages[0], Kind.CLIP_GRAD, version=version)


NO_EPILOGUE = Epilogue()


@dataclass(frozen=True)
class Program:
    """What every rank does in one step, in order; the simulator and the runtime both execute it.

    A send hands its message over and goes on. A receive only asks for a message; the action that
    needs it waits for it. Messages from one rank to another are asked for in the order of sends.
    A reduction starts where it stands and runs beside what follows, until its optimizer step;
    which waits for those of the stage's replicas too.
    """

    actions: Rows
    placement: Placement
    edges: tuple[Edge, ...]
    name: str = field(default="", compare=False)
    replicas: Replicas = ()
    epilogue: Epilogue = NO_EPILOGUE

    def __post_init__(self) -> None:
        """Lists become tuples, as in a schedule."""
        object.__setattr__(self, "actions", as_rows(self.actions))
        object.__setattr__(self, "placement", as_numbers("placement", self.placement))
        object.__setattr__(self, "replicas", as_numbers("replicas", self.replicas))

    def to_csv(self, path: str | Path) -> None:
        """One row per rank, in the form that torch calls compute_comms."""
        write_text(path, csv.render(self.actions), ScheduleError)

    @cached_property
    def schedule(self) -> Schedule:
        """The compute actions alone, and the steps of a stream."""
        rows = tuple(tuple(a for a in row if is_scheduled(a)) for row in self.actions)
        return Schedule(rows, self.placement, self.name, self.replicas)

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.edges, self.placement, self.replicas)


def twin(send: Action) -> Action:
    """The receive at the other end of a send."""
    return Action(send.peer, TWIN[send.kind], send.microbatch, send.stage)


class Tasks(NamedTuple):
    """A program as numbered tasks on lanes, for `run_lanes`.

    The first lanes are the ranks, with a task for each action of theirs. Then come a lane for each
    pair of ranks, on which messages follow each other, and a lane for each rank's reductions.
    """

    background: dict[Name, int]  # messages by their send, reductions by their start
    lanes: list[list[int]]
    waits: Waits

    @property
    def num_tasks(self) -> int:
        return len(self.waits.rows)


Name = tuple[int, Action]  # a rank, and one of its actions without the version that it uses


def program_tasks(
    program: Program, delay: Callable[[Action], float], *, rendezvous: bool = False
) -> Tasks:
    """With `rendezvous`, a rank stays in its send until the other end has asked for the message."""
    home = program.routes.home
    names = [(rank, _bare(action)) for rank, row in enumerate(program.actions) for action in row]
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {  # a B goes by the name of its I as well
        (rank, a._replace(kind=Kind.I)): numbers[rank, a] for rank, a in names if a.kind is Kind.B
    }
    flying = [name for name in names if name[1].kind in TWIN or name[1].kind is Kind.REDUCE_GRAD]
    background = {name: len(names) + i for i, name in enumerate(flying)}

    def awaited(send: Action) -> int:
        return background[home(send.stage, send.microbatch), send]

    def other_end(send: Action) -> int:
        return numbers[home(send.peer, send.microbatch), twin(send)]

    def waits(rank: int, action: Action) -> Iterator[tuple[int, float]]:
        if action.kind in COMPUTE:
            yield from ((awaited(a), delay(a)) for a in program.routes.awaited(action))
        yield from ((numbers[rank, a], 0.0) for a in _needs(program.routes, action))
        if rendezvous and action.kind in TWIN:
            yield other_end(action), 0.0
        if action.kind is Kind.STEP:
            reduction = action._replace(kind=Kind.REDUCE_GRAD)
            for replica in ranks_of(program.placement, program.replicas, action.stage):
                yield background[replica, reduction], 0.0

    waits_of_all = [list(waits(*name)) for name in names]
    for name in flying:
        ends = [other_end(name[1])] if name[1].kind in TWIN else []
        waits_of_all.append([(number, 0.0) for number in (numbers[name], *ends)])
    rows = [tuple((b - task, time) for b, time in w) for task, w in enumerate(waits_of_all)]
    count = iter(range(len(names)))
    lanes = [[next(count) for _ in row] for row in program.actions]
    return Tasks(background, lanes + _background_lanes(program, background), Waits(1, rows))


def _bare(action: Action) -> Action:
    """What is needed is an action's result, whatever weights it used."""
    is_plain = action.version == NO_VERSION or action.kind not in COMPUTE
    return action if is_plain else action._replace(version=NO_VERSION)


def _needs(routes: Routes, action: Action) -> Iterator[Action]:
    """What must have run on the same rank; a gradient goes by the name of I, be it I or B."""
    stage, kind, microbatch, _, _ = action
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


def _background_lanes(program: Program, background: dict[Name, int]) -> list[list[int]]:
    lanes: dict[tuple[int, int | None], list[int]] = {}
    for (rank, action), number in background.items():
        is_message = action.kind in TWIN
        target = program.routes.home(action.peer, action.microbatch) if is_message else None
        lanes.setdefault((rank, target), []).append(number)
    return list(lanes.values())
