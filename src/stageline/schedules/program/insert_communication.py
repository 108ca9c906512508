"""Insert sends, receives, reductions and optimizer steps between the actions of a schedule.

A send directly follows the action that produced the message. A receive is posted directly after the
last action of its own rank that must have completed, by data dependencies, before the message can
be sent, and ahead of that action's own sends:

    rank 0 │ 0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1
    rank 1 │ 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1                 p = 2, m = 2

So whatever the timing, the receive of a message is posted before its send starts. A send that waits
for its receive (a rendezvous) therefore never waits, and cannot be part of a deadlock.

In a stream no receive is posted before the first forward of its mini-batch, because until then it
is not known whether there will be another mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stageline.schedules.action import Action, Kind
from stageline.schedules.edges import Edge, Routes, chain, checked_edges
from stageline.schedules.placement import stages_by_rank
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue, Program, receive_of
from stageline.schedules.program.stream import segment_bounds, version_made_from
from stageline.schedules.schedule import Schedule


def insert_communication(
    schedule: Schedule, edges: Iterable[Edge] | None = None, epilogue: Epilogue = NO_EPILOGUE
) -> Program:
    """Return the program of a schedule that has been checked; `lower` checks it first."""
    edges = chain(schedule.num_stages) if edges is None else edges
    edges = checked_edges(edges, schedule.num_stages)
    routes = Routes(edges, schedule.placement, schedule.replicas)
    receives = _receives(schedule, routes)
    rows = tuple(
        tuple(_row(row, routes, receives[rank], schedule.num_microbatches, epilogue))
        for rank, row in enumerate(schedule.actions)
    )
    return Program(
        rows, schedule.placement, routes.edges, schedule.name, schedule.replicas, epilogue
    )


def _row(
    row: Iterable[Action],
    routes: Routes,
    receives: list[list[Action]],
    size: int,
    epilogue: Epilogue,
) -> Iterator[Action]:
    row = list(row)
    last = {  # by stage and version of its weights: the action that completes the gradients
        (a.stage, version_made_from(a, size)): position
        for position, a in enumerate(row)
        if a.kind in (Kind.W, Kind.B)
    }
    yield from receives[0]
    for position, action in enumerate(row):
        if action.kind is Kind.STEP:
            yield from epilogue.actions([action.stage], action.version)
        yield action
        yield from receives[position + 1]
        yield from routes.sends(action)
        version = version_made_from(action, size)
        if last.get((action.stage, version)) == position:
            yield Action(action.stage, Kind.REDUCE_GRAD, version=version)
    if not any(a.kind is Kind.STEP for a in row):
        yield from epilogue.actions(stage for stage, _ in last)
        yield from (Action(stage, Kind.STEP) for stage, _ in sorted(last))


def _receives(schedule: Schedule, routes: Routes) -> list[list[list[Action]]]:
    """Return the receives to post, for each rank and each number of actions completed on it."""
    receives: list[list[list[Action]]] = [
        [[] for _ in range(len(row) + 1)] for row in schedule.actions
    ]
    done_after = {
        (stage, kind is Kind.F, microbatch): position + 1
        for row in schedule.actions
        for position, (stage, kind, microbatch, _, _) in enumerate(row)
        if kind is not Kind.W and kind is not Kind.STEP
    }
    ancestors = _ancestors(routes)
    firsts = [_minibatch_starts(row, schedule) for row in schedule.actions]
    for row in schedule.actions:
        known = [0] * schedule.num_ranks  # actions of each rank that must be done by now
        for action in row:
            for send in routes.awaited(action):
                source = schedule.rank_of(send.stage, send.microbatch)
                producer = (send.stage, send.kind is Kind.SEND_F, send.microbatch)
                known[source] = max(known[source], done_after[producer])
            for send in routes.sends(action):
                target = schedule.rank_of(send.peer, send.microbatch)
                for stage, is_forward in ancestors[send.stage, send.kind, send.peer]:
                    done = done_after[stage, is_forward, send.microbatch]
                    known[target] = max(known[target], done)
                first = firsts[target][send.microbatch // schedule.num_microbatches]
                receives[target][max(first, known[target])].append(receive_of(send))
    return receives


def _minibatch_starts(row: Iterable[Action], schedule: Schedule) -> list[int]:
    """Return the position at which each mini-batch begins; the first one begins at 0."""
    bounds = segment_bounds(row, schedule.num_microbatches, schedule.num_minibatches)
    return [0, *(first for first, _ in bounds[1:])]


def _ancestors(routes: Routes) -> dict[tuple[int, Kind, int], list[tuple[int, bool]]]:
    """Return what the receiving rank must have run before each message, as (stage, is forward).

    The keys are the sending stage, the kind of send and the receiving stage. A value depends on
    the forwards of all stages before it, a gradient on the backwards of all stages after it.
    """
    placement = routes.placement
    held = stages_by_rank(placement, max(placement) + 1)
    before, after = _closure(routes.writers), _closure(routes.readers)
    found = {}
    for writer, reader in routes.edges:
        values = (stage for stage in held[placement[reader]] if before[writer] >> stage & 1)
        found[writer, Kind.SEND_F, reader] = [(stage, True) for stage in values]
        gradients = (stage for stage in held[placement[writer]] if after[reader] >> stage & 1)
        found[reader, Kind.SEND_B, writer] = [(stage, False) for stage in gradients]
    return found


def _closure(steps: list[list[int]]) -> list[int]:
    """Return the stages that can be reached from each stage, one bit per stage.

    Sets of integers would take gigabytes for thousands of stages.
    """
    reached = [0] * len(steps)
    forward = any(target > stage for stage, targets in enumerate(steps) for target in targets)
    for stage in range(len(steps))[:: -1 if forward else 1]:
        for target in steps[stage]:
            reached[stage] |= 1 << target | reached[target]
    return reached
