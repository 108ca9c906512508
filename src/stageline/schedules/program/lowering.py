"""Where sends, receives, reductions and optimizer steps go among the actions of a schedule.

A send stands right behind the action that made the message. A receive stands right behind the last
action of its own rank that the sender must have heard of, and in front of that action's own sends:

    rank 0 │ 0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1
    rank 1 │ 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1                 p = 2, m = 2

Whoever sends has therefore heard from the other rank after it asked. So in no timing whatever does
a message leave before it is asked for, and a send that waits for its receive (a rendezvous) never
waits at all: it can be part of no deadlock.

In a stream no message is asked for before the first forward of its mini-batch: that one will come
at all is not known before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.edges import Edge, Routes, chain, checked_edges
from stageline.schedules.placement import stages_by_rank
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue, Program, twin
from stageline.schedules.program.stream import made_from, segment_bounds
from stageline.schedules.schedule import Schedule


def lowered(
    schedule: Schedule, edges: Iterable[Edge] | None = None, epilogue: Epilogue = NO_EPILOGUE
) -> Program:
    """See `lower`; the schedule was checked."""
    edges = chain(schedule.num_stages) if edges is None else edges
    edges = checked_edges(edges, schedule.num_stages)
    routes = Routes(edges, schedule.placement, schedule.replicas)
    asked = _receives(schedule, routes)
    rows = tuple(
        tuple(_row(row, routes, asked[rank], schedule.num_microbatches, epilogue))
        for rank, row in enumerate(schedule.actions)
    )
    return Program(
        rows, schedule.placement, routes.edges, schedule.name, schedule.replicas, epilogue
    )


def _row(
    row: Iterable[Action],
    routes: Routes,
    asked: list[list[Action]],
    size: int,
    epilogue: Epilogue,
) -> Iterator[Action]:
    row = list(row)
    last = {  # of each stage and version of its weights, the action that completes the gradients
        (a.stage, made_from(a, size)): position
        for position, a in enumerate(row)
        if a.kind in (Kind.W, Kind.B)
    }
    yield from asked[0]
    for position, action in enumerate(row):
        if action.kind is Kind.STEP:
            yield from epilogue.actions([action.stage], action.version)
        yield action
        yield from asked[position + 1]
        yield from routes.sends(action)
        version = made_from(action, size)
        if last.get((action.stage, version)) == position:
            yield Action(action.stage, Kind.REDUCE_GRAD, version=version)
    if not any(a.kind is Kind.STEP for a in row):
        yield from epilogue.actions(stage for stage, _ in last)
        yield from (Action(stage, Kind.STEP) for stage, _ in sorted(last))


def _receives(schedule: Schedule, routes: Routes) -> list[list[list[Action]]]:
    """For each rank and each number of actions done, the receives to ask for then."""
    asked: list[list[list[Action]]] = [
        [[] for _ in range(len(row) + 1)] for row in schedule.actions
    ]
    done_after = {
        (stage, kind is Kind.F, microbatch): position + 1
        for row in schedule.actions
        for position, (stage, kind, microbatch, _, _) in enumerate(row)
        if kind is not Kind.W and kind is not Kind.STEP
    }
    forebears = _forebears(routes)
    firsts = [_firsts(row, schedule) for row in schedule.actions]
    for row in schedule.actions:
        heard = [0] * schedule.num_ranks  # how many actions of each rank this one knows to be done
        for action in row:
            for send in routes.awaited(action):
                source = schedule.home(send.stage, send.microbatch)
                maker = (send.stage, send.kind is Kind.SEND_F, send.microbatch)
                heard[source] = max(heard[source], done_after[maker])
            for send in routes.sends(action):
                target = schedule.home(send.peer, send.microbatch)
                for stage, is_forward in forebears[send.stage, send.kind, send.peer]:
                    done = done_after[stage, is_forward, send.microbatch]
                    heard[target] = max(heard[target], done)
                first = firsts[target][send.microbatch // schedule.num_microbatches]
                asked[target][max(first, heard[target])].append(twin(send))
    return asked


def _firsts(row: Iterable[Action], schedule: Schedule) -> list[int]:
    """Where each mini-batch begins; the first one with all that there is."""
    bounds = segment_bounds(row, schedule.num_microbatches, schedule.num_minibatches)
    return [0, *(first for first, _ in bounds[1:])]


def _forebears(routes: Routes) -> dict[tuple[int, Kind, int], list[tuple[int, bool]]]:
    """By sending stage, kind and receiving stage: what its rank did to bring the message about.

    A value descends from the forwards of all stages that led to it, a gradient from the backwards
    of all stages behind it. They are given as (stage, is forward).
    """
    home = routes.placement
    held = stages_by_rank(home, max(home) + 1)
    before, after = _closure(routes.writers), _closure(routes.readers)
    found = {}
    for writer, reader in routes.edges:
        values = [(stage, True) for stage in held[home[reader]] if before[writer] >> stage & 1]
        found[writer, Kind.SEND_F, reader] = values
        gradients = [(stage, False) for stage in held[home[writer]] if after[reader] >> stage & 1]
        found[reader, Kind.SEND_B, writer] = gradients
    return found


def _closure(steps: list[list[int]]) -> list[int]:
    """All stages that can be reached from each stage, a bit for each: sets of them would take
    gigabytes for thousands of stages.
    """
    reached = [0] * len(steps)
    forward = any(target > stage for stage, targets in enumerate(steps) for target in targets)
    for stage in range(len(steps))[:: -1 if forward else 1]:
        for target in steps[stage]:
            reached[stage] |= 1 << target | reached[target]
    return reached
