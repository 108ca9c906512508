"""The tasks of each rank: its actions, with all that is known of them before any data comes.

They are worked out once: what the host does between two actions is idle time of its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from stageline.model.layers import INPUT, Value
from stageline.runtime.stage.stage import Stage
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.edges import Routes
from stageline.schedules.program.stream import Period, PeriodEntry

SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
# By sending stage, kind and receiving stage: the values of a message, or whose gradients it has.
Contents = Mapping[tuple[int, Kind, int], tuple[Value, ...]]


class Task(NamedTuple):
    """One action of a rank's program, with all that is known of it before the data."""

    action: Action
    awaits: tuple[tuple[Action, bool], ...]  # messages, and whether they come from another rank
    gives: tuple[tuple[Action, bool, tuple[Value, ...]], ...]  # and what of its values goes there
    in_halves: bool  # the backward of this micro-batch comes as I and W
    waits: bool  # between this forward and its backward the rank does something else
    ahead: PeriodEntry | None  # the backward that is next, if one is
    lag: int  # how many mini-batches its own came before the one that begins the segment
    version: int  # of the weights, relative to the number of its mini-batch
    depth: int  # how many versions before the one that a step makes are still in use after it
    is_last_step: bool  # the last step of the rank


def tasks_of(period: Period, stages: Sequence[Stage]) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of each rank."""
    in_halves = {
        (beat.action.stage, beat.action.microbatch)
        for row in period.rows
        for beat in row
        if beat.action.kind is Kind.I
    }
    contents = _contents(stages)
    rows = []
    for row in (_without_empty(row, contents) for row in period.rows):
        compute = [beat for beat in row if beat.action.kind in COMPUTE]
        following = dict(zip(compute, [*compute[1:], None], strict=True))
        rows.append(
            tuple(
                Task(
                    beat.action,
                    _awaits(period.routes, beat.action, contents),
                    _gives(period.routes, beat.action, contents),
                    (beat.action.stage, beat.action.microbatch) in in_halves,
                    _waits(beat, following.get(beat)),
                    _ahead(following.get(beat)),
                    beat.lag,
                    beat.version,
                    depth(row, position),
                    beat.action.kind is Kind.STEP
                    and all(later.action.kind is not Kind.STEP for later in row[position + 1 :]),
                )
                for position, beat in enumerate(row)
            )
        )
    return tuple(rows)


def depth(row: Sequence[PeriodEntry], position: int) -> int:
    """Return how many older versions than the one that a step makes are still used after it.

    Entries behind the step use their weights in this segment, all others in the next one.
    """
    made = row[position]
    if made.action.kind is not Kind.STEP:
        return 0
    used = (
        beat.version - beat.lag + (0 if other > position else 1)
        for other, beat in enumerate(row)
        if beat.action.kind in COMPUTE and beat.action.stage == made.action.stage
    )
    return max(0, made.version - made.lag - min(used))


def _contents(stages: Sequence[Stage]) -> Contents:
    """Return what passes between two stages: values forward, and gradients of values backward.

    A value goes from its writer to each stage that reads it. Its gradient goes from reader to
    reader, the last one first, each adding its own, and then to the writer: in that order autograd
    adds them where nothing is cut.
    """
    found: dict[tuple[int, Kind, int], list[Value]] = {}
    for value, readers in _readers(stages).items():
        writer = next((n for n, stage in enumerate(stages) if value.writer in stage.numbers), None)
        if writer is not None:
            for reader in readers:
                found.setdefault((writer, Kind.SEND_F, reader), []).append(value)
        path = readers if writer is None else [writer, *readers]
        for target, source in pairwise(path):
            found.setdefault((source, Kind.SEND_B, target), []).append(value)
    return {key: tuple(sorted(values)) for key, values in found.items()}


def _readers(stages: Sequence[Stage]) -> dict[Value, list[int]]:
    """Return for each value the stages that it enters, in their order."""
    readers: dict[Value, list[int]] = {}
    for number, stage in enumerate(stages):
        for value in stage.reads:
            readers.setdefault(value, []).append(number)
    return readers


def _without_empty(row: Sequence[PeriodEntry], contents: Contents) -> list[PeriodEntry]:
    """Leave out messages that have no content: an edge may be there for one direction only."""
    return [beat for beat in row if _is_needed(beat.action, contents)]


def _is_needed(action: Action, contents: Contents) -> bool:
    if action.kind in SENDS:
        return (action.stage, action.kind, action.peer) in contents
    if action.kind in RECEIVES:
        return (action.peer, RECEIVES[action.kind], action.stage) in contents
    return True


def _awaits(routes: Routes, action: Action, contents: Contents) -> tuple[tuple[Action, bool], ...]:
    stage, kind, microbatch, _, _ = action
    if kind is Kind.F:
        sends = [Action(w, Kind.SEND_F, microbatch, stage) for w in routes.writers[stage]]
    elif kind in (Kind.B, Kind.I):
        sends = [Action(r, Kind.SEND_B, microbatch, stage) for r in routes.readers[stage]]
    else:
        sends = []
    return tuple(
        (send, routes.crosses(send.stage, stage)) for send in sends if _is_needed(send, contents)
    )


def _gives(
    routes: Routes, action: Action, contents: Contents
) -> tuple[tuple[Action, bool, tuple[Value, ...]], ...]:
    stage, kind, microbatch, _, _ = action
    if kind is Kind.F:
        sends = [Action(stage, Kind.SEND_F, microbatch, r) for r in routes.readers[stage]]
    elif kind in (Kind.B, Kind.I):
        sends = [Action(stage, Kind.SEND_B, microbatch, w) for w in routes.writers[stage]]
    else:
        sends = []
    return tuple(
        (send, routes.crosses(stage, send.peer), contents[stage, send.kind, send.peer])
        for send in sends
        if _is_needed(send, contents)
    )


def _waits(beat: PeriodEntry, following: PeriodEntry | None) -> bool:
    """Return whether something else runs between a forward and its backward."""
    action = beat.action
    is_next = (
        following is not None
        and following.action.kind in (Kind.B, Kind.I)
        and (following.action.stage, following.action.microbatch, following.lag)
        == (action.stage, action.microbatch, beat.lag)
    )
    return action.kind is Kind.F and not is_next


def _ahead(following: PeriodEntry | None) -> PeriodEntry | None:
    is_backward = following is not None and following.action.kind in (Kind.B, Kind.I)
    return following if is_backward else None


def inputs_of(stage: Stage) -> tuple[Value, ...]:
    """Return what a stage needs from the loader."""
    return tuple(sorted(value for value in stage.reads if value.writer == INPUT))


def first_reads(stages: Sequence[Stage]) -> list[tuple[Value, ...]]:
    """Return for each stage the loader's values whose gradients end there."""
    firsts = {v: readers[0] for v, readers in _readers(stages).items() if v.writer == INPUT}
    return [tuple(v for v, first in firsts.items() if first == n) for n in range(len(stages))]
