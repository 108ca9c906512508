"""The interface between the loop and where it runs: one backend for each way to run ranks.

    serial      all ranks in the calling thread, in turns
    threads     a thread for each rank
    processes   one rank in this process, the others in those of a process group

A backend starts streams, has the collectives of its processes, and is closed. Everything else that
ranks do together is built from these collectives, beside its subject.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stageline.runtime.engine.loop import Loop
    from stageline.runtime.engine.minibatch import Message, MessageKey, MiniBatch, Stream
    from stageline.schedules.action import Action

T = TypeVar("T")


class Group(Enum):
    """Processes that work together."""

    PIPELINE = "the ranks of this pipeline"
    REPLICAS = "the processes with the same stages, in all replicas of the pipeline"
    SIBLINGS = "the ranks that hold the same stage, and take turns"
    EVERYONE = "all processes"
    SAVES = "all processes, for the thread of a save under way"


class Collectives(Protocol):
    """Operations of several processes; all of them make the same calls in the same order.

    `what` names it in errors. `group` is a `Group`, and ranks count within it.
    """

    replica: int  # which of the pipeline's replicas this is
    num_replicas: int
    is_first: bool  # the first of all processes
    is_first_part: bool  # the first of processes that hold parts of the same tensors
    is_first_sibling: bool  # the first of the ranks that hold the same stage
    device: torch.device | None  # of tensors that processes share; None: they are in host memory

    def has(self, rank: int) -> bool:
        """Return whether a rank of the pipeline runs in this process."""

    def size(self, group: Group) -> int:
        """Return the number of processes."""

    def gather(
        self, own: T, what: str, group: Group = Group.PIPELINE, task: str | None = None
    ) -> list[T]:
        """Return the value of each process, by rank; `task` names work that may take long."""

    def broadcast(self, tree: T, source: int, what: str) -> T:
        """Return what the rank `source` of the pipeline has, tensors included."""

    def all_reduce(self, tensor: Tensor, what: str, group: Group) -> Callable[[], Tensor]:
        """Start to sum a tensor in place; call the result to wait for the sum."""

    def shared_sum(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None] | None:
        """Start to sum gradients over replicas through memory; call the result to wait for it.

        Return None if the replicas do not share memory.
        """

    def all_gather(self, tensor: Tensor, what: str, group: Group) -> Callable[[], list[Tensor]]:
        """Start to gather tensors of one shape; call the result to wait for them."""

    def transfer(self, tree: Any, source: int, target: int, what: str) -> Any:
        """Move a tree of tensors between two ranks of the pipeline; the source gives back None."""

    def guarded(self, what: str, task: str | None = None) -> AbstractContextManager[None]:
        """Raise on all ranks if one does not take part; `task` names work that may take long."""

    def busy(self, task: str) -> AbstractContextManager[None]:
        """Let others wait while this process does something that may take long."""

    def reporting(self) -> AbstractContextManager[None]:
        """Report what the block raises to the ranks that wait for this one."""


class Transport(Protocol):
    """Carries the messages of one stream between ranks."""

    def send(self, key: MessageKey, message: Message) -> None:
        """Hand a message over, and go on."""

    def expect(self, minibatch: int, receive: Action) -> None:
        """Announce a receive: its message may come from now on."""

    def meet(self, rank: int, key: MessageKey, numbers: Mapping[int, Tensor]) -> None:
        """Bring numbers to a meeting of all ranks.

        A rank that asks for the message `key` waits for all ranks, and gets all their numbers.
        """


class Running(Protocol):
    """A stream on its way through the ranks of this process."""

    def feed(self, minibatch: MiniBatch) -> None:
        """Add a mini-batch; ranks may begin it."""

    def wait(self, position: int) -> None:
        """Wait until all ranks here are done with a mini-batch that enough others have followed."""

    def drain(self) -> None:
        """Wait until everything is done: no more mini-batches will come."""


class Backend(Protocol):
    """Runs ranks, in this process or across several."""

    @property
    def collectives(self) -> Collectives: ...

    def start(self, loop: Loop, stream: Stream) -> Running: ...

    def close(self) -> None: ...
