"""Define `Program`: a schedule with its sends, receives, reductions and optimizer steps."""

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
from stageline.schedules.schedule import Rows, Schedule, as_numbers, as_rows, is_scheduled
from stageline.schedules.task_graph import Dependencies

RECEIVE_KIND = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
OVERLAPPED = (*RECEIVE_KIND, Kind.REDUCE_GRAD)  # these run beside what their rank computes


class Epilogue(NamedTuple):
    """The actions of a model at the end of each mini-batch, in addition to reductions and steps."""

    reduces_tied: bool = False  # several layers share a weight
    stages_with_stats: tuple[int, ...] = ()  # stages whose running statistics are updated
    clips: bool = False  # gradients are clipped before the optimizer steps

    def actions(self, stages: Iterable[int], version: int = NO_VERSION) -> Iterator[Action]:
        """Yield the actions of a rank before its optimizer steps.

        Tied weights and clipping concern a whole rank, and belong to its first stage here.
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
    """The ordered actions of every rank, which the simulator and the runtime both execute.

    A send is asynchronous. A receive is posted and does not block: the action that needs the
    message waits for it. All messages from one rank to another are received in the order in which
    they are sent, whatever their kinds and stages; those in the other direction are independent of
    them. A reduction starts at its position and overlaps with the following actions. Its optimizer
    step waits for it, and for the reductions of the stage's other replicas.
    """

    actions: Rows
    placement: Placement
    edges: tuple[Edge, ...]
    name: str = field(default="", compare=False)
    replicas: Replicas = ()
    epilogue: Epilogue = NO_EPILOGUE

    def __post_init__(self) -> None:
        """Convert lists to tuples, so that the program cannot change."""
        object.__setattr__(self, "actions", as_rows(self.actions))
        object.__setattr__(self, "placement", as_numbers("placement", self.placement))
        object.__setattr__(self, "replicas", as_numbers("replicas", self.replicas))

    def to_csv(self, path: str | Path) -> None:
        """Write one row per rank, in the format that torch calls compute_comms."""
        write_text(path, csv.render(self.actions), ScheduleError)

    @cached_property
    def schedule(self) -> Schedule:
        """Return the compute actions only, with the optimizer steps if this is a stream."""
        rows = tuple(tuple(a for a in row if is_scheduled(a)) for row in self.actions)
        return Schedule(rows, self.placement, self.name, self.replicas)

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.edges, self.placement, self.replicas)


def receive_of(send: Action) -> Action:
    """Return the receive that matches a send."""
    return Action(send.peer, RECEIVE_KIND[send.kind], send.microbatch, send.stage)


class ProgramTasks(NamedTuple):
    """A program as numbered tasks on lanes, the input of `run_lanes`.

    The first lanes are the ranks, with one task for each of their actions. Then follow one lane
    for each direction between two ranks, which carries its messages in order, and one for each
    rank's reductions.
    """

    background: dict[RankAction, int]  # a message by its send, a reduction by its REDUCE_GRAD
    lanes: list[list[int]]
    dependencies: Dependencies

    @property
    def num_tasks(self) -> int:
        return len(self.dependencies.rows)


RankAction = tuple[int, Action]  # a rank, and one of its actions without the weight version


def program_tasks(
    program: Program,
    delay: Callable[[Action], float],
    lead: Callable[[int], float] = lambda _: 0.0,
    *,
    rendezvous: bool = False,
) -> ProgramTasks:
    """Return a program's tasks; with `rendezvous`, a send blocks until its receive is posted.

    The backward of a stage may start by `lead` before its gradients arrive.
    """
    rank_of = program.routes.rank_of
    rows = enumerate(program.actions)
    names = [(rank, _without_version(action)) for rank, row in rows for action in row]
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {  # a B is also found as the I that it contains
        (rank, a._replace(kind=Kind.I)): numbers[rank, a] for rank, a in names if a.kind is Kind.B
    }
    overlapped = [(rank, a) for rank, a in names if a.kind in OVERLAPPED]
    background = {name: len(names) + i for i, name in enumerate(overlapped)}

    def awaited(send: Action) -> int:
        return background[rank_of(send.stage, send.microbatch), send]

    def other_end(send: Action) -> int:
        return numbers[rank_of(send.peer, send.microbatch), receive_of(send)]

    def waits(rank: int, action: Action) -> Iterator[tuple[int, float]]:
        if action.kind in COMPUTE:
            early = lead(action.stage) if action.kind in (Kind.I, Kind.B) else 0.0
            yield from ((awaited(a), delay(a) - early) for a in program.routes.awaited(action))
        yield from ((numbers[rank, a], 0.0) for a in _needs(program.routes, action))
        if rendezvous and action.kind in RECEIVE_KIND:
            yield other_end(action), 0.0
        if action.kind is Kind.STEP:
            reduction = action._replace(kind=Kind.REDUCE_GRAD)
            for replica in ranks_of(program.placement, program.replicas, action.stage):
                yield background[replica, reduction], 0.0

    waits_of_all = [list(waits(*name)) for name in names]
    for name in overlapped:
        ends = [other_end(name[1])] if name[1].kind in RECEIVE_KIND else []
        waits_of_all.append([(number, 0.0) for number in (numbers[name], *ends)])
    distances = [tuple((b - task, time) for b, time in w) for task, w in enumerate(waits_of_all)]
    count = iter(range(len(names)))
    lanes = [[next(count) for _ in row] for row in program.actions]
    lanes += _background_lanes(program, background)
    return ProgramTasks(background, lanes, Dependencies(1, distances))


def _without_version(action: Action) -> Action:
    """Return an action without its version: others need its result, whatever weights it used."""
    is_plain = action.version == NO_VERSION or action.kind not in COMPUTE
    return action if is_plain else action._replace(version=NO_VERSION)


def _needs(routes: Routes, action: Action) -> Iterator[Action]:
    """Yield the actions that must precede one on the same rank; I represents both I and B."""
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


def _background_lanes(program: Program, background: dict[RankAction, int]) -> list[list[int]]:
    lanes: dict[tuple[int, int | None], list[int]] = {}
    for (rank, action), number in background.items():
        is_message = action.kind in RECEIVE_KIND
        target = program.routes.rank_of(action.peer, action.microbatch) if is_message else None
        lanes.setdefault((rank, target), []).append(number)
    return list(lanes.values())
