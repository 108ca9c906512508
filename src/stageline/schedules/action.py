"""One thing that a rank does: `2F0` is stage 2, forward, micro-batch 0."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, cast


class Kind(StrEnum):
    """The letters of torch.distributed.pipelining, so that its CSV files and ours interchange."""

    F = "F"  # forward
    I = "I"  # noqa: E741  gradient of the input: the letter that torch prints
    W = "W"  # gradient of the weights
    B = "B"  # both gradients at once
    SEND_F = "SEND_F"  # a value, to the stage that reads it
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # its gradient, back to the stage that wrote it
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"  # sum a stage's gradients over its replicas
    REDUCE_TIED = "REDUCE_TIED"  # sum the gradients of weights that several layers share
    UPDATE_STATS = "UPDATE_STATS"  # update the running statistics of a stage's BatchNorm layers
    CLIP_GRAD = "CLIP_GRAD"  # scale a rank's gradients to the limit on their global norm
    STEP = "STEP"  # the optimizer, on a stage's parameters

    __hash__ = str.__hash__  # Enum's own is written in Python: actions as keys take twice as long


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
# Actions that are done once for all micro-batches of a mini-batch.
ONCE = frozenset({Kind.REDUCE_GRAD, Kind.REDUCE_TIED, Kind.UPDATE_STATS, Kind.CLIP_GRAD, Kind.STEP})
WHOLE_BATCH = -1  # their micro-batch
NO_PEER = -1
NO_VERSION = -1  # there is one version of the weights, which goes without saying


class Action(NamedTuple):
    """A stage, what is done there, and for which micro-batch.

    Where weights change while micro-batches are on their way, an action names the version that it
    uses, and a STEP the version that it makes: the number of steps that led to it.

    >>> print(Action(2, Kind.F, 0), Action(1, Kind.SEND_F, 3, peer=2))
    2F0 1SEND_F3
    >>> print(Action(0, Kind.SEND_F, 3, peer=2))
    0SEND_F3>2
    >>> print(Action(2, Kind.B, 5, version=3), Action(2, Kind.STEP, version=4))
    2B5@3 2STEP@4
    """

    stage: int
    kind: Kind
    microbatch: int = WHOLE_BATCH
    peer: int = NO_PEER  # the stage at the other end, for sends and receives
    version: int = NO_VERSION  # of the stage's weights

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == WHOLE_BATCH else str(self.microbatch)
        far = self.peer != NO_PEER and self.peer != neighbour(self.stage, self.kind)
        peer = f">{self.peer}" if far else ""
        version = "" if self.version == NO_VERSION else f"@{self.version}"
        return f"{self.stage}{self.kind}{microbatch}{peer}{version}"


def neighbour(stage: int, kind: Kind) -> int:
    """The peer that goes without saying: torch's files name none, theirs are always neighbours."""
    if not isinstance(cast("object", stage), int):
        return NO_PEER  # an action that `check` will refuse, and shows
    return stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1
