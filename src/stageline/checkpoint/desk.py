"""Who takes part in a pipeline's checkpoints: processes that agree or fail together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.runtime.mesh import OwnGroup
from stageline.runtime.peers import Group

T = TypeVar("T")
PATIENCE = 600.0  # seconds that a rank waits for others to write or read their part


class Saving:
    """A save under way."""

    def __init__(self, write: Callable[[], Path], *, in_background: bool) -> None:
        self.result: Future[Path] = Future()
        self.is_told = False  # how it ended
        if in_background:  # not a daemon: the end of the program waits for it
            Thread(target=self._run, args=(write,), name="stageline-save").start()
        else:
            self._run(write)

    def wait(self) -> Path:
        """The checkpoint, when it is complete; raises what went wrong."""
        self.is_told = True
        return self.result.result()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.result.set_result(write())
        except BaseException as error:
            self.result.set_exception(error)


class Desk:
    """Of one pipeline. State: the save under way, and a process group that only it uses.

    Several threads must not share a group: their collectives would be taken for each other's.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.saving: Saving | None = None
        self.own: OwnGroup | None = None
        self.guard: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        if isinstance(pipe.peers, Group):
            ranks = dist.get_process_group_ranks(pipe.peers.place.everyone)
            limit = timedelta(seconds=PATIENCE)
            # what is told are objects, so not NCCL
            with pipe.peers.guard("checkpoints"):
                self.own = OwnGroup(dist.new_group(ranks, timeout=limit, backend="gloo"))
            self.guard = pipe.peers.guard
        self.is_first = self.group is None or dist.get_rank(self.group) == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.own.now if self.own else None

    def settle(self) -> None:
        """Wait for the save under way; if it failed and nobody was told, raise that."""
        saving, self.saving = self.saving, None
        if saving is not None and not saving.is_told:
            saving.wait()

    def close(self) -> None:
        self.settle()
        if self.own is not None:
            self.own.close()

    def everywhere(self, value: T) -> list[T]:
        """By process, what each of them has."""
        if self.group is None:
            return [value]
        found: list[T] = [value] * dist.get_world_size(self.group)
        with self.guard("a checkpoint or report"):
            dist.all_gather_object(found, value, self.group)
        return found

    def agreed(self, act: Callable[[], T]) -> T:
        """What this process makes of it; if one of them fails, all do."""
        try:
            result = act()
        except Exception as error:
            self.everywhere(str(error) or type(error).__name__)
            raise
        for rank, text in enumerate(self.everywhere("")):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")
        return result

    def by_first(self, act: Callable[[], T]) -> T:
        """What the first process makes of it, in every process."""
        result = self.agreed(lambda: act() if self.is_first else None)
        found = self.everywhere(result)[0]
        assert found is not None
        return found


def desk_of(pipe: Pipeline) -> Desk:
    """Made when it is first asked for, which all ranks do in the same place."""
    if not isinstance(pipe.desk, Desk):
        pipe.desk = Desk(pipe)
    return pipe.desk
