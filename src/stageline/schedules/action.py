"""Define `Action`, one operation of a rank: `2F0` is stage 2, forward, micro-batch 0."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, cast


class Kind(StrEnum):
    """The kinds of actions, with the names of torch.distributed.pipelining's CSV files."""

    F = "F"  # forward
    I = "I"  # noqa: E741  gradient of the input: the letter that torch prints
    W = "W"  # gradient of the weights
    B = "B"  # both gradients in one action
    SEND_F = "SEND_F"  # send a value to the stage that reads it
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # send its gradient back to the stage that wrote it
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"  # sum a stage's gradients over its replicas
    REDUCE_TIED = "REDUCE_TIED"  # sum the gradients of weights that several layers share
    UPDATE_STATS = "UPDATE_STATS"  # update the running statistics of a stage's BatchNorm layers
    CLIP_GRAD = "CLIP_GRAD"  # scale a rank's gradients to the limit on their global norm
    STEP = "STEP"  # run the optimizer on a stage's parameters

    __hash__ = str.__hash__  # Enum's is written in Python: lookups by action would be twice as slow


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
# Actions that run once per mini-batch, and their micro-batch.
ONCE = frozenset({Kind.REDUCE_GRAD, Kind.REDUCE_TIED, Kind.UPDATE_STATS, Kind.CLIP_GRAD, Kind.STEP})
WHOLE_BATCH = -1
NO_PEER = -1
NO_VERSION = -1  # the weights have only one version


class Action(NamedTuple):
    """One operation on one stage, for one micro-batch.

    If weights change while micro-batches are in flight, an action names the version of the weights
    that it uses, and a STEP the version that it makes. Version n is the result of n steps.

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
    peer: int = NO_PEER  # the stage at the other end of a send or receive
    version: int = NO_VERSION  # of the stage's weights

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == WHOLE_BATCH else str(self.microbatch)
        is_explicit = self.peer != NO_PEER and self.peer != default_peer(self.stage, self.kind)
        peer = f">{self.peer}" if is_explicit else ""
        version = "" if self.version == NO_VERSION else f"@{self.version}"
        return f"{self.stage}{self.kind}{microbatch}{peer}{version}"


def default_peer(stage: int, kind: Kind) -> int:
    """Return the neighbouring stage, which is the peer in torch's files: they do not write it."""
    if not isinstance(cast("object", stage), int):
        return NO_PEER  # `check` will reject this action, and print it
    return stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1
