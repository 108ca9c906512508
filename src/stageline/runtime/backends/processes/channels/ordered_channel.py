"""A channel with NCCL's rules for tensors in host memory, on top of gloo.

    sender's thread     waits for "ready" ─► sends a      waits for "ready" ─► sends b
    receiver's thread   sends "ready" ─► receives a       sends "ready" ─► receives b

Each end has a queue of its own, and a thread that carries it out in order. So to issue an operation
never blocks, and one that waits for the other end blocks all behind it. Simulated devices use it:
a program that deadlocks over NCCL does so here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.runtime.backends.processes.messages.message_parts import RankLost

DATA, READY = 2, 3  # tags
# What an operation reads and writes, and its name, told when it is issued
Observe = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]
Transfer = Callable[[Tensor], None]


class QueuedOperation:
    """A send or a receive. State: when it was done, or why it failed."""

    def __init__(self, other: int) -> None:
        self.other = other
        self.done: Future[float] = Future()

    def wait(self, limit: float) -> float:
        try:
            return self.done.result(limit)
        except TimeoutError:
            raise RankLost(self.other, "the time is over") from None


class OrderedChannel:
    """One end of a channel, in a group of two. State: the operations that are not done."""

    def __init__(self, group: dist.ProcessGroup, other: int, name: str, observe: Observe) -> None:
        """Connect to the rank `other` of the pipeline."""
        self.group, self.other, self.name, self.observe = group, other, name, observe
        self.peer = 1 - dist.get_rank(group)
        self.queue: SimpleQueue[tuple[QueuedOperation, Transfer, Tensor] | None] = SimpleQueue()
        self.thread = Thread(target=self._run, name="stageline-channel", daemon=True)
        self.thread.start()

    def send(self, tensor: Tensor) -> QueuedOperation:
        self.observe("a send", [tensor], [])
        return self._issued(self._send, tensor)

    def receive(self, tensor: Tensor) -> QueuedOperation:
        self.observe("a receive", [], [tensor])
        return self._issued(self._receive, tensor)

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def pause(self, number: int) -> None:
        """Begin an operation at once, in the channel's thread; tests wait here."""

    def _issued(self, transfer: Transfer, tensor: Tensor) -> QueuedOperation:
        operation = QueuedOperation(self.other)
        self.queue.put((operation, transfer, tensor))
        return operation

    def _run(self) -> None:
        number, failure = 0, ""
        while (item := self.queue.get()) is not None:
            operation, transfer, tensor = item
            try:
                if not failure:
                    self.pause(number)
                    transfer(tensor)
            except RuntimeError as error:
                failure = str(error)  # the connection broke, and is of no more use
            if failure:
                operation.done.set_exception(RankLost(self.other, failure))
            else:
                operation.done.set_result(perf_counter())
            number += 1
            del item, operation, transfer, tensor  # their memory is free while this waits

    def _send(self, tensor: Tensor) -> None:
        self.group.recv([_token()], self.peer, READY).wait()
        self.group.send([tensor], self.peer, DATA).wait()

    def _receive(self, tensor: Tensor) -> None:
        arriving = self.group.recv([tensor], self.peer, DATA)
        self.group.send([_token()], self.peer, READY).wait()
        arriving.wait()


def _token() -> Tensor:
    return torch.empty(1, dtype=torch.uint8)
