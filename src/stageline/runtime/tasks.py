"""What is known of a rank's actions before any data comes: what they await, give and keep.

It is worked out once: with emulated devices a millisecond of ours is a millisecond of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime.stage import Stage
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.edges import Routes
from stageline.schedules.stream import Beat, Period


class Task(NamedTuple):
    """One action of a rank's program, with all that is known of it before the data."""

    action: Action
    stage: Stage | None  # of what computes
    awaits: tuple[tuple[Action, bool], ...]  # messages, and whether they come from another rank
    gives: tuple[tuple[Action, bool, tuple[Value, ...]], ...]  # and what of its values goes there
    in_halves: bool  # the backward of this micro-batch comes as I and W
    waits: bool  # between this forward and its backward the rank does something else
    ahead: Beat | None  # the backward that is next, if one is
    lag: int  # how many mini-batches its own came before the one that begins the segment
    version: int  # of the weights, relative to the number of its mini-batch
    depth: int  # how many versions before the one that a step makes are still in use after it
    is_last_step: bool  # the last step of the rank


def tasks_of(
    period: Period, layers: LayerSequence, stages: list[Stage]
) -> tuple[tuple[Task, ...], ...]:
    """By rank."""
    in_halves = {
        (beat.action.stage, beat.action.microbatch)
        for row in period.rows
        for beat in row
        if beat.action.kind is Kind.I
    }
    reads = [_reads(layers, stage.numbers) for stage in stages]
    rows = []
    for row in period.rows:
        compute = [beat for beat in row if beat.action.kind in COMPUTE]
        following = dict(zip(compute, [*compute[1:], None], strict=True))
        rows.append(
            tuple(
                Task(
                    beat.action,
                    stages[beat.action.stage] if beat in following else None,
                    _awaits(period.routes, beat.action),
                    _gives(period.routes, beat.action, reads, stages),
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


def depth(row: Sequence[Beat], position: int) -> int:
    """How many older versions than the one that is made here are still used after it.

    What stands further on in the row uses its weights in this segment; all others not before the
    next one.
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


def _awaits(routes: Routes, action: Action) -> tuple[tuple[Action, bool], ...]:
    stage, kind, microbatch, _, _ = action
    if kind is Kind.F:
        sends = [Action(w, Kind.SEND_F, microbatch, stage) for w in routes.writers[stage]]
    elif kind in (Kind.B, Kind.I):
        sends = [Action(r, Kind.SEND_B, microbatch, stage) for r in routes.readers[stage]]
    else:
        sends = []
    return tuple((send, routes.crosses(send.stage, stage)) for send in sends)


def _gives(
    routes: Routes, action: Action, reads: list[set[Value]], stages: list[Stage]
) -> tuple[tuple[Action, bool, tuple[Value, ...]], ...]:
    stage, kind, microbatch, _, _ = action
    if kind is Kind.F:
        sends = [
            (Action(stage, Kind.SEND_F, microbatch, reader), _from(stages[stage], reads[reader]))
            for reader in routes.readers[stage]
        ]
    elif kind in (Kind.B, Kind.I):
        sends = [
            (Action(stage, Kind.SEND_B, microbatch, writer), _from(stages[writer], reads[stage]))
            for writer in routes.writers[stage]
        ]
    else:
        sends = []
    return tuple((send, routes.crosses(stage, send.peer), values) for send, values in sends)


def _from(writer: Stage, reads: set[Value]) -> tuple[Value, ...]:
    return tuple(sorted(value for value in reads if value.writer in writer.numbers))


def _waits(beat: Beat, following: Beat | None) -> bool:
    """Whether what this forward keeps is not needed at once."""
    action = beat.action
    is_next = (
        following is not None
        and following.action.kind in (Kind.B, Kind.I)
        and (following.action.stage, following.action.microbatch, following.lag)
        == (action.stage, action.microbatch, beat.lag)
    )
    return action.kind is Kind.F and not is_next


def _ahead(following: Beat | None) -> Beat | None:
    is_backward = following is not None and following.action.kind in (Kind.B, Kind.I)
    return following if is_backward else None


def _reads(layers: LayerSequence, numbers: range) -> set[Value]:
    """What a stage needs from outside."""
    read = {value for number in numbers for value in layers.sources[number]}
    return {value for value in read if value.writer not in numbers}


def inputs_of(layers: LayerSequence, numbers: range) -> tuple[Value, ...]:
    """What a stage needs from the loader."""
    return tuple(sorted(v for v in _reads(layers, numbers) if v.writer == INPUT))
