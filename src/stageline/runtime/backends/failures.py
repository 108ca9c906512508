"""Errors that name the rank, the layer, the action and the cause."""

from __future__ import annotations

from stageline.errors import StageError
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.minibatch import Stream
from stageline.schedules.action import WHOLE_BATCH, Kind

WORDS = {
    Kind.F: "forward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.B: "backward",
    Kind.REDUCE_TIED: "sum over tied weights",
    Kind.UPDATE_STATS: "running statistics",
    Kind.CLIP_GRAD: "gradient clipping",
    Kind.STEP: "optimizer step",
}


def stage_error(loop: Loop, stream: Stream, rank: int, error: BaseException) -> StageError:
    """Return the error of a rank of this process, and where the others were stopped."""
    others = [(r, a) for r, (_, a) in sorted(stream.now.items()) if r != rank]
    stopped = ", ".join(f"rank {r} at {a}" for r, a in others) or "no other rank, as none had begun"
    return StageError(f"{failure_text(loop, stream, rank, error)}\n  stopped: {stopped}")


def failure_text(
    loop: Loop, stream: Stream, rank: int, error: BaseException, name: str = ""
) -> str:
    """Return which rank, layer, action and micro-batch failed, and the cause.

    `name` is that of a rank which has replicas, or shares its stages with others.
    """
    minibatch, action = stream.now[rank]
    layer = loop.stages[action.stage].running_layer
    which = "" if action.microbatch == WHOLE_BATCH else f", micro-batch {action.microbatch}"
    which += f" of mini-batch {minibatch}" if stream.is_open else ""
    return (
        f"{name or f'rank {rank}'} failed in layer {layer!r} at {action} "
        f"({WORDS.get(action.kind, action.kind)}{which})\n"
        f"  {type(error).__name__}: {_text(error)}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"
