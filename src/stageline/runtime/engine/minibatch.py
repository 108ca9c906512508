"""Mini-batches on their way through a pipeline, and the stream that carries them.

All state of a run is here: what goes in, what waits between two actions, and what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from stageline.model.layers import Value
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.in_place import NO_MARKS, Marks
from stageline.runtime.stage.stage_values import InFlight, Target
from stageline.schedules.action import Action, Kind

if TYPE_CHECKING:
    from stageline.runtime.engine.loop import RankRun
    from stageline.runtime.optimizers.stage_optimizers import StageOptimizers, Update

Contents = dict[Value, Any]  # values, or gradients of values
Timer = Callable[[], Any]  # returns the time, or an event that will hold it
MessageKey = tuple[int, Action]  # the position of a mini-batch in its stream, and the send
Actions = Generator[MessageKey, "Message", None]  # yields what it needs, and is sent the message

UNKNOWN = float("nan")  # a time that other ranks have recorded

FORWARDS = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UPDATE_STATS})
BACKWARDS = frozenset(
    {Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD, Kind.REDUCE_TIED}
)


class Purpose(Enum):
    """The purpose of a run: it decides which actions of a program are carried out."""

    TRAIN = "train"
    EVALUATE = "evaluate"  # no backward will come
    FILL = "fill"  # the backward comes later, when the caller's loss is known
    DRAIN = "drain"

    @property
    def trains(self) -> bool:
        """Return whether there is a backward."""
        return self in (Purpose.TRAIN, Purpose.DRAIN)


KINDS = {
    Purpose.TRAIN: frozenset(Kind),
    Purpose.EVALUATE: FORWARDS,
    Purpose.FILL: FORWARDS,
    Purpose.DRAIN: BACKWARDS | {Kind.STEP},
}


class Message(NamedTuple):
    """A message from one stage to another."""

    contents: Any  # by value; or numbers that ranks exchange
    sent_at: float
    marks: Marks = NO_MARKS  # which of the tensors share memory with others


class RecordedAction(NamedTuple):
    """The times at which a rank ran an action, in seconds of `perf_counter`.

    A rank on a device records events of the device in their places, until the trace is over.
    """

    action: Action
    asked: float  # when it began to wait for its messages
    sent: float  # when the last of them was sent, or UNKNOWN; 0 if no other rank sent one
    start: float
    end: float
    minibatch: int = 0


@dataclass
class MiniBatch:
    """One mini-batch: what goes in, what waits between, what comes out."""

    inputs: list[Mapping[str, Any]]  # by micro-batch, the values that the loader brings
    seed: int
    number: int  # how many steps came before
    first: int  # the number of its first micro-batch among those of all replicas
    ambient: ForwardContext
    targets: list[Target] = field(default_factory=list)
    position: int = 0  # in its stream
    has_own_seed: bool = False  # random numbers depend on its seed, but not on its number
    losses: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)  # of the last stage, if there is no loss
    output_gradients: list[Contents] = field(default_factory=list)  # to begin the backward with
    # by micro-batch and value, the gradients of its tensors
    input_gradients: dict[tuple[int, Value], list[Tensor | None]] = field(default_factory=dict)
    waiting: dict[int, InFlight] = field(default_factory=dict)  # by stage
    updates: dict[int, Update] = field(default_factory=dict)  # by stage
    total_norms: dict[int, Tensor] = field(default_factory=dict)  # by rank, if it was clipped


class Boxes(NamedTuple):
    """The messages that a rank holds."""

    inbox: dict[MessageKey, Message]  # between two stages of this rank
    outbox: dict[MessageKey, Message]  # made, and not yet sent


@dataclass
class Stream:
    """Mini-batches that follow each other through the ranks; `step` is a stream of one."""

    purpose: Purpose
    lag: int  # how many segments after its own a mini-batch is done
    optimizers: StageOptimizers | None = None  # None: the optimizer belongs to the caller
    run_rank: Callable[[RankRun], Actions] | None = None  # None: the plain loop
    timers: Mapping[int, Timer] = field(default_factory=dict)  # of ranks that a device times
    is_open: bool = False  # results are given back while more mini-batches are on their way
    records: bool = False  # whether times are kept: an endless stream has too many
    minibatches: dict[int, MiniBatch] = field(default_factory=dict)  # by position
    length: int = 0  # how many there have been
    num_microbatches: int = 0  # of the largest of them
    times: dict[int, list[RecordedAction]] = field(default_factory=dict)  # by rank
    now: dict[int, MessageKey] = field(default_factory=dict)  # what each rank does, for errors
    boxes: dict[int, Boxes] = field(default_factory=dict)  # by rank

    def add(self, minibatch: MiniBatch) -> None:
        minibatch.position = self.length
        self.minibatches[self.length] = minibatch
        self.length += 1
        self.num_microbatches = max(self.num_microbatches, len(minibatch.inputs))

    @property
    def segments_to_drain(self) -> range:
        """Return the segments that no mini-batch begins."""
        return range(self.length, self.length + self.lag if self.length else 0)
