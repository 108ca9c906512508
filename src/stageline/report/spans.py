"""Define the parts of a timeline: spans of actions, transfers of messages, memory levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from stageline.errors import ModelError
from stageline.schedules.action import Action


class Span(NamedTuple):
    """One action of a rank, with its start and end."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """One message between two ranks; `send.stage` made it, `send.peer` reads it."""

    source: int
    target: int
    send: Action
    start: float
    end: float


class MemoryLevel(NamedTuple):
    """The memory that a rank holds from `time` on: activations only, and in total."""

    time: float
    activations: float
    total: float


Spans = tuple[tuple[Span, ...], ...]  # by rank


class Unmeasured(tuple[tuple[Span, ...], ...]):
    """Stands for the spans of a timeline that is still being measured: nobody can read them."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:  # noqa: PLE0303  it never returns
        self._refuse()

    def __getitem__(self, _: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ModelError(
            "the timeline is still being measured, and has no spans yet: read it after the block "
            "of pipe.trace()"
        )
