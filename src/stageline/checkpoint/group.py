"""Operations that all processes of a pipeline perform together on a checkpoint.

All access to the pipeline's collectives from `checkpoint/` and `training/` is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

from torch import Tensor

from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline, session_of
from stageline.runtime.backends.backend import Collectives, Group

T = TypeVar("T")


class PendingSave:
    """A save in progress, possibly in a background thread."""

    def __init__(self, write: Callable[[], Path], *, in_background: bool) -> None:
        self.result: Future[Path] = Future()
        self.is_awaited = False  # the caller has received its result or error
        if in_background:  # not a daemon: the program does not exit before the save is complete
            Thread(target=self._run, args=(write,), name="stageline-save").start()
        else:
            self._run(write)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its path; raise if the save failed."""
        self.is_awaited = True
        return self.result.result()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.result.set_result(write())
        except BaseException as error:
            self.result.set_exception(error)


class CheckpointGroup:
    """The processes that save and load a pipeline's checkpoints. State: the save in progress.

    Saves have a process group of their own: if two threads used one group, the collectives of one
    could be matched with those of the other. The caller's thread uses the pipeline's group as
    always. The save in progress is the only user of the other group, and there is one at a time.
    """

    def __init__(self, collectives: Collectives, group: Group, name: str) -> None:
        self.collectives, self.group, self.name = collectives, group, name
        self.pending: PendingSave | None = None
        self.is_first = collectives.is_first
        self.num_tasks = 0
        self.task: str | None = None  # the current long task

    def start_save(
        self, write: Callable[[CheckpointGroup], Path], *, in_background: bool
    ) -> PendingSave:
        """Start a save after the previous one has ended."""
        self.finish_save()
        own = CheckpointGroup(self.collectives, Group.SAVES, f"save {self.num_tasks}")
        self.num_tasks += 1

        def act() -> Path:
            with own.guarded("a checkpoint"):
                return write(own)

        self.pending = PendingSave(act, in_background=in_background)
        return self.pending

    def finish_save(self) -> None:
        """Wait for the save in progress; raise its error unless `wait()` has raised it already."""
        pending, self.pending = self.pending, None
        if pending is not None and not pending.is_awaited:
            pending.wait()

    def close(self) -> None:
        self.finish_save()

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in order of rank."""
        return self.collectives.gather(value, "a checkpoint or report", self.group, self.task)

    def run(self, act: Callable[[], T]) -> T:
        """Call `act` in every process and return its result; if it raises in one, raise in all."""
        with self._long_task():
            try:
                result = act()
            except Exception as error:
                self.gather(str(error) or type(error).__name__)
                raise
            for rank, text in enumerate(self.gather("")):
                if text:
                    raise CheckpointError(f"rank {rank}: {text}")
            return result

    def run_on_first(self, act: Callable[[], T]) -> T:
        """Call `act` in the first process and return its result in every process."""
        result = self.run(lambda: act() if self.is_first else None)
        found = self.gather(result)[0]
        assert found is not None
        return found

    @contextmanager
    def _long_task(self) -> Iterator[None]:
        """Mark work that may exceed the timeout: other ranks wait as long as this one is alive."""
        if self.task is not None:
            yield
            return
        self.num_tasks += 1
        self.task = f"{self.name} {self.num_tasks}"
        try:
            with self.collectives.busy(self.task):
                yield
        finally:
            self.task = None

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Enclose collectives of this group; raise on all ranks if one of them has failed."""
        with self._long_task(), self.collectives.guarded(what, self.task):
            yield


def checkpoint_group(pipe: Pipeline) -> CheckpointGroup:
    """Return the pipeline's group; the first call makes it, at the same point on all ranks."""
    session = session_of(pipe)
    if not isinstance(session.checkpoints, CheckpointGroup):
        collectives = session.assembly.collectives
        session.checkpoints = CheckpointGroup(collectives, Group.EVERYONE, "checkpoint")
    return session.checkpoints


def has_rank(pipe: Pipeline, rank: int) -> bool:
    """Return whether this process runs the given rank of the pipeline."""
    return session_of(pipe).assembly.collectives.has(rank)


def is_written_here(pipe: Pipeline, tensor: Tensor) -> bool:
    """Return whether this replica writes a tensor that it has: the first, or each its shard."""
    assembly = session_of(pipe).assembly
    shards = assembly.sharded.weights if assembly.sharded is not None else ()
    return assembly.collectives.replica == 0 or tensor in shards


def sum_over_replicas(pipe: Pipeline, count: float) -> float:
    return session_of(pipe).assembly.replicas.total(count)


def report_errors(pipe: Pipeline) -> AbstractContextManager[None]:
    """Enclose user code: ranks that wait for this one are shown what it raises."""
    return session_of(pipe).assembly.collectives.reporting()
