"""Tell a layer that runs whether its forward will be recomputed, or is being recomputed."""

from __future__ import annotations

from contextvars import ContextVar
from enum import Enum


class ForwardKind(Enum):
    """How a forward relates to its backward."""

    ONLY = "it is not run again"
    FIRST = "it will be run again for its backward"
    AGAIN = "it is being run again for its backward"


_RUNNING: ContextVar[ForwardKind | None] = ContextVar("stageline_forward_kind", default=None)


def running_forward() -> ForwardKind | None:
    """Return the kind of the stage's forward that is running here, or None outside of any."""
    return _RUNNING.get()


class RunningForward:
    """Within it, `running_forward` returns this kind."""

    def __init__(self, kind: ForwardKind) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        self.token = _RUNNING.set(self.kind)

    def __exit__(self, *_: object) -> None:
        _RUNNING.reset(self.token)
