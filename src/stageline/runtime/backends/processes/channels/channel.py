"""The interface to an ordered channel, which carries tensors one way between two processes.

    rank 0 │ send a     send b         the first send meets the first receive, and so on,
    rank 1 │ receive a  receive b      whatever the tensors are called

It has the rules of a communicator of NCCL: an operation begins when those before it on its channel
are done, and a send may wait until its receive has begun. So an operation that waits holds up all
behind it, and the two directions between two ranks need a channel each.

What a channel does is queued on the stream that is current, and the host waits for none of it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Operation(Protocol):
    """A send or a receive that was issued."""

    def wait(self, limit: float) -> float:
        """Wait for it where a stream cannot, on a CPU; return when it was done, 0.0 if unknown.

        Raise `RankLost` if it fails, or takes longer than `limit` seconds.
        """


class Channel(Protocol):
    """One end of a channel."""

    def send(self, tensor: Tensor) -> Operation:
        """Send a contiguous tensor, which must not change until that is done."""

    def receive(self, tensor: Tensor) -> Operation:
        """Receive into a contiguous tensor of the size that is sent."""

    def close(self) -> None:
        """End the threads of this end, when its operations are done."""
