"""A channel over a process group of torch for a device: NCCL, and what other devices have.

This has not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stageline.runtime.backends.processes.messages.message_parts import RankLost


class IssuedOperation:
    """An operation that a stream waits for."""

    def wait(self, limit: float) -> float:  # noqa: ARG002  the host has nothing to wait for
        return 0.0


ISSUED = IssuedOperation()


class TorchChannel:
    """One end of a channel, in a group of two processes of which nobody else knows."""

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        """Connect to the rank `other` of the pipeline."""
        self.group, self.other = group, other
        self.peer = 1 - dist.get_rank(group)

    def send(self, tensor: Tensor) -> IssuedOperation:
        return self._queued(self.group.send, tensor)

    def receive(self, tensor: Tensor) -> IssuedOperation:
        return self._queued(self.group.recv, tensor)

    def close(self) -> None:
        """Do nothing: there is no thread, and the group is closed by its owner."""

    def _queued(self, issue: Callable[..., Any], tensor: Tensor) -> IssuedOperation:
        """Queue an operation on the current stream.

        A group has a stream of its own, which waits for the current one. In return the current one
        waits for the group's, so what is ordered behind it is ordered behind the operation.
        `wait()` would do the same, but blocks the host if TORCH_NCCL_BLOCKING_WAIT is set.
        """
        try:
            issue([tensor], self.peer, 0).synchronize()
        except RuntimeError as error:
            raise RankLost(self.other, str(error)) from None
        return ISSUED
