"""Who takes part in a pipeline's checkpoints: processes that agree or fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.runtime.backends.processes.collectives import Group
from stageline.runtime.backends.processes.exchange import gathered

T = TypeVar("T")


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
    """Where the processes of a pipeline meet over a checkpoint. State: the save under way.

    Each conversation has a process group of its own: with two threads on one group, collectives of
    one would be taken for those of the other. The caller's thread has the pipeline's own group, as
    in all else that it does; the group of saves is handed to the save under way, and to nobody
    else, and there is one save at a time.
    """

    def __init__(self, peers: Group | None, group: dist.ProcessGroup | None, name: str) -> None:
        self.peers, self.group, self.name = peers, group, name
        self.saving: Saving | None = None
        self.is_first = group is None or dist.get_rank(group) == 0
        self.num_tasks = 0
        self.task: str | None = None  # the one under way, which may take long

    def save(self, write: Callable[[Desk], Path], *, in_background: bool) -> Saving:
        """Start a save when the one before has ended."""
        self.settle()
        group = self.peers.place.saves if self.peers else None
        own = Desk(self.peers, group, f"save {self.num_tasks}")
        self.num_tasks += 1

        def act() -> Path:
            with own.together("a checkpoint"):
                return write(own)

        self.saving = Saving(act, in_background=in_background)
        return self.saving

    def settle(self) -> None:
        """Wait for the save under way; if it failed and nobody was told, raise that."""
        saving, self.saving = self.saving, None
        if saving is not None and not saving.is_told:
            saving.wait()

    def close(self) -> None:
        self.settle()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what may take long in this process: others wait for it while it is alive."""
        if self.task is not None or self.peers is None:
            yield
            return
        self.num_tasks += 1
        self.task = f"{self.name} {self.num_tasks}"
        try:
            with self.peers.place.watch.taking_part(self.task):
                yield
        finally:
            self.task = None

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around work and collectives of this desk's group; raises on all ranks if one is gone."""
        with self.working():
            if self.peers is None:
                yield
            else:
                with self.peers.guard(what, self.task):
                    yield

    def everywhere(self, value: T) -> list[T]:
        """By process, what each of them has."""
        if self.peers is None or self.group is None:
            return [value]
        with self.peers.guard("a checkpoint or report", self.task):
            found = gathered(value, self.group)
        self.peers.place.watch.is_starting = False
        return found

    def agreed(self, act: Callable[[], T]) -> T:
        """What this process makes of it; if one of them fails, all do."""
        with self.working():
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
        peers = pipe.peers if isinstance(pipe.peers, Group) else None
        pipe.desk = Desk(peers, peers.place.everyone if peers else None, "checkpoint")
    return pipe.desk
