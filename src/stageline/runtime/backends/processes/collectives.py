"""Collectives over process groups: the nine primitives that everything shared is built from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageline.model import trees
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.backend import Group
from stageline.runtime.backends.processes import exchange
from stageline.runtime.backends.processes.connection import Connection
from stageline.runtime.backends.processes.device_trees import (
    broadcast_tree,
    gather_trees,
    receive_tree,
    send_tree,
)
from stageline.runtime.backends.processes.groups import ProcessGroups
from stageline.runtime.backends.processes.messages.packing import Packing
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.backends.processes.shared_sums import shared_sums

T = TypeVar("T")
LAST_SUMS = 5.0  # seconds in which sums that nobody has read may still arrive


class ProcessCollectives:
    """One rank is here, the others in the processes of groups. State: sums under way."""

    def __init__(self, connection: Connection, accelerator: Accelerator | None) -> None:
        self.connection, self.groups = connection, connection.groups
        self.device = None if accelerator is None else accelerator.device
        self.replica, self.num_replicas = self.groups.replica, self.groups.num_replicas
        self.is_first = dist.get_rank(self.groups.everyone) == 0
        self.is_first_part = self.groups.is_first_part
        siblings = self.groups.of(Group.SIBLINGS)
        self.is_first_sibling = siblings is None or dist.get_rank(siblings) == 0
        self.shared_sums = shared_sums(self.groups)
        self.sums: list[Any] = []  # they must have arrived before the process ends
        weakref.finalize(self, _arrive, self.sums, self.groups)

    def has(self, rank: int) -> bool:
        return rank == self.connection.rank

    def size(self, group: Group) -> int:
        found = self.groups.of(group)
        return 1 if found is None else dist.get_world_size(found)

    def gather(
        self, own: T, what: str, group: Group = Group.PIPELINE, task: str | None = None
    ) -> list[T]:
        found = self.groups.of(group)
        if found is None:
            return [own]
        with self.guarded(what, task):
            if self.device is not None and group is not Group.SAVES:
                return gather_trees(own, found, self.device, what)
            return exchange.gather(own, found, what=what)

    def broadcast(self, tree: T, source: int, what: str) -> T:
        group, is_here = self.groups.pipeline, self.has(source)
        with self.guarded(what):
            if self.device is not None:
                return cast("T", broadcast_tree(tree, source, group, self.device))
            described = ValueSpec.of(tree).description if is_here else None
            shape = ValueSpec.from_description(exchange.broadcast(described, source, group))
            packing = Packing.of(shape.tensor_specs)
            buffer = packing.pack(trees.tensors(tree)) if is_here else packing.empty()
            dist.broadcast(buffer, dist.get_global_rank(group, source), group)
        found: T = shape.rebuild(t if t is None else t.detach() for t in packing.unpack(buffer)[0])
        return found

    def all_reduce(self, tensor: Tensor, what: str, group: Group) -> Callable[[], Tensor]:
        found = self.groups.of(group)
        if found is None:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=found, async_op=True)
        assert work is not None  # this process is of the group
        self.sums[:] = [other for other in self.sums if not other.is_completed()] + [work]
        return lambda: self._arrived(work, what, tensor)

    def shared_sum(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None] | None:
        is_elsewhere = self.device is not None or parameters[0].device.type != "cpu"
        if self.shared_sums is None or is_elsewhere:
            return None
        with self.guarded("gradients"):
            finish = self.shared_sums.start(parameters)

        def finished() -> None:
            with self.guarded("gradients"):
                finish()

        return finished

    def all_gather(self, tensor: Tensor, what: str, group: Group) -> Callable[[], list[Tensor]]:
        found = self.groups.of(group)
        if found is None:
            return lambda: [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(found))]
        work = dist.all_gather(tensors, tensor, found, async_op=True)
        return lambda: self._arrived(work, what, tensors)

    def transfer(self, tree: Any, source: int, target: int, what: str) -> Any:
        group = self.groups.pipeline
        with self.guarded(what):
            if self.device is not None:
                if self.has(source):
                    return send_tree(tree, target, group)
                return receive_tree(source, group, self.device)
            if self.has(source):
                shape = ValueSpec.of(tree)
                exchange.send(shape.description, target, group)
                buffer = Packing.of(shape.tensor_specs).pack(trees.tensors(tree))
                dist.send(buffer, dist.get_global_rank(group, target), group)
                return None
            shape = ValueSpec.from_description(exchange.receive(source, group))
            packing = Packing.of(shape.tensor_specs)
            buffer = packing.empty()
            dist.recv(buffer, dist.get_global_rank(group, source), group)
            return shape.rebuild(packing.unpack(buffer)[0])

    def guarded(self, what: str, task: str | None = None) -> AbstractContextManager[None]:
        return self.connection.guarded(what, task)

    def busy(self, task: str) -> AbstractContextManager[None]:
        return self.connection.watch.busy_with(task)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.connection.watch.note_user_error(error)
            raise

    def close(self) -> None:
        """Release the groups: they take file descriptors, ten for a pipeline of two ranks."""
        _arrive(self.sums, self.groups)
        self.groups.close()

    def _arrived(self, work: Any, what: str, found: T) -> T:
        with self.guarded(what):
            work.wait()
        return found


def _arrive(sums: list[Any], groups: ProcessGroups) -> None:
    """Wait for sums: a process that ends in the middle of one aborts, whatever it has achieved."""
    try:
        for work in sums:
            work.wait(timedelta(seconds=LAST_SUMS))
    except RuntimeError:  # the others are gone
        groups.hang_up()
    sums.clear()
