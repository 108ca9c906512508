"""Detect failures of other ranks through heartbeats in the rendezvous store.

    heartbeat   every rank writes twice a second where it is; a rank that stops doing so is named
    failure     a rank that fails writes why before it raises; all ranks raise the first one
    exit        a rank that leaves writes so, and which exception ended its program, if any

Two threads of each process do this. One talks to the store, which may block if the network is down.
The other talks to nobody: it ends waits that exceed the timeout, whatever the store does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread, main_thread
from time import monotonic, sleep, time
from typing import TypeVar

import torch.distributed as dist

from stageline.errors import StageError
from stageline.runtime.backends.processes.heartbeats import (
    Heartbeat,
    RankPosition,
    RankStore,
    call_with_timeout,
    describe_positions,
    describe_silent_ranks,
    error_text,
    exit_reason,
    is_store_of_torchrun,
    store_unreachable,
)

HEARTBEAT_INTERVAL = 0.5  # seconds
STORE_TIMEOUT = 2.0  # seconds that the store has for an answer, once something is wrong
LAST_HEARTBEAT = 10.0  # seconds that the store has for the last heartbeat, if nothing is wrong
FAILURE_GRACE = 3.0  # seconds in which a rank that failed can say why, after its connection broke
START_UP_TIMEOUT = 300.0  # seconds that a rank may be later than others at their first exchange
CHECKPOINT_TIMEOUT = 600.0  # seconds that a rank may take longer than others for a checkpoint
RANKS_PER_READ = 64  # with more ranks heartbeats are read less often, to relieve the store
Answer = TypeVar("Answer")


@dataclass
class Wait:
    """A thread's wait for all other ranks in a collective."""

    what: str
    task: str | None  # ranks that are busy with it may exceed the timeout
    begun: float = field(default_factory=monotonic)
    since: float = field(default_factory=monotonic)  # since when ranks are missing without excuse


class FailureWatch:
    """State: the last heartbeats of other ranks, the waits in progress, and the first failure."""

    def __init__(
        self,
        store: dist.distributed_c10d.Store,
        names: Sequence[str],
        rank: int,
        limit: float,
        cancel_waits: Callable[[], None],
    ) -> None:
        self.store = RankStore(store, len(names))
        self.names, self.rank, self.limit = names, rank, limit
        self.others = [other for other in range(len(names)) if other != rank]
        self.position = RankPosition()
        self.cancel_waits = cancel_waits  # of all threads of this process
        self.failure: str | None = None
        self.is_store_reachable = True
        self.last_answer = monotonic()  # of the store
        self.is_starting = True
        self.tasks: list[str] = []
        self.waits: dict[int, Wait] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        self.last_alive: dict[int, float] = {}  # when another rank's heartbeat last changed
        self.user_error = ""  # what the user's code raised, if it did
        self.is_over = Event()
        self.exit_reason: str | None = None
        self.outlasts_others = False  # the store must not end before others have read the exit
        self.threads = [
            Thread(target=target, name="stageline-watch", daemon=True)
            for target in (self._exchange_heartbeats, self._check_waits)
        ]

    @property
    def name(self) -> str:
        return self.names[self.rank]

    def start(self) -> None:
        """Wait until all ranks are there; raise `TimeoutError` with the names of missing ones.

        This rank's own heartbeat is awaited as well: what the caller does next may block until the
        others have seen it.
        """
        for thread in self.threads:
            thread.start()
        end = monotonic() + max(START_UP_TIMEOUT, self.limit)
        missing = list(range(len(self.names)))
        while missing and self.failure is None and self.is_store_reachable:
            awaited = tuple(missing)
            found = call_with_timeout(
                max(HEARTBEAT_INTERVAL, end - monotonic()),
                lambda: [rank for rank in awaited if self.store.has_heartbeat(rank)],  # noqa: B023
            )
            if found is None:
                self.is_store_reachable = False
                return
            missing = [rank for rank in missing if rank not in found]
            if missing and monotonic() >= end:
                raise TimeoutError(", ".join(self.names[rank] for rank in missing))
            sleep(HEARTBEAT_INTERVAL / 10 if missing else 0)

    def report_failure(self, text: str) -> str:
        """Return the first failure that any rank has reported, which all ranks raise."""
        if self.failure is None:
            answer = self._ask(lambda: self.store.report_failure(text))
            self.failure = answer or f"{text}\n  {store_unreachable(self.names[0])}"
        return self.failure

    def note_user_error(self, error: BaseException) -> None:
        """Show an exception of the user's code to ranks that wait for this one."""
        self.user_error = f", left by {type(error).__name__}: {error_text(error)}"

    @contextmanager
    def waiting(self, what: str, task: str | None = None) -> Iterator[None]:
        """Enclose a wait for all other ranks; cancel it if one of them does not take part.

        Ranks that are busy with the same `task` may exceed the timeout.
        """
        wait = Wait(what, task)
        self.waits[id(wait)] = wait
        try:
            yield
        finally:
            del self.waits[id(wait)]

    def call(self, what: str, call: Callable[[], Answer]) -> Answer:
        """Return the result of a call in which all ranks take part, and which cannot be cancelled.

        It runs in a thread of its own, which is abandoned when a rank fails: that raises
        `StageError`.
        """
        running: Future[Answer] = Future()
        Thread(target=_complete, args=(running, call), daemon=True).start()
        with self.waiting(what):
            while self.failure is None and self.is_store_reachable:
                if futures.wait([running], HEARTBEAT_INTERVAL).done:
                    return running.result()
        raise StageError(self.failure or store_unreachable(self.names[0]))

    @contextmanager
    def busy_with(self, task: str) -> Iterator[None]:
        """Enclose a task that may exceed the timeout, and for which others wait."""
        self.tasks.append(task)
        try:
            yield
        finally:
            self.tasks.remove(task)

    def cause_of(self, broken: str, suspect: int | None = None) -> str:
        """Return why a connection broke: a reported failure, or else which rank is gone.

        `suspect` is the rank at the other end, if that is known.
        """
        begun, before = monotonic(), self._read_heartbeats()
        while (
            self.failure is None and self.is_store_reachable and monotonic() < begun + FAILURE_GRACE
        ):
            if gone := [rank for rank in self.others if self._exit_text(rank)]:
                return self._report_gone(gone, broken)
            sleep(HEARTBEAT_INTERVAL / 2)
        if self.failure is not None:
            return self.failure
        now = self._read_heartbeats()
        gone = [rank for rank in self.others if now and now.get(rank) == before.get(rank)]
        return self._report_gone(gone or [suspect] if suspect is not None else gone, broken)

    def describe_silent_ranks(self) -> str:
        """Return which ranks have sent no heartbeat lately, for an error."""
        return describe_silent_ranks(self._read_heartbeats(), self.names)

    def describe_positions(self) -> str:
        """Return where each rank is, for an error."""
        return describe_positions(self._read_heartbeats(), self.names, self.rank)

    def leave(self) -> None:
        """Write that this rank takes part no longer, and why its program ends, if it does."""
        if not self.is_over.is_set():
            is_ending = not main_thread().is_alive()
            self.exit_reason = self.failure or (
                exit_reason() if is_ending else "it has closed its pipeline"
            )
            self.outlasts_others = self.holds_store and (is_ending or self.failure is not None)
            self.is_over.set()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(self._seconds_to_leave)

    @property
    def _seconds_to_leave(self) -> float:
        """Return how long the threads may take to end.

        A thread that is in torch's C++ code when the interpreter ends aborts the process. So a
        store that is slow because the machine is busy is waited for; one that hangs is not.
        """
        if self.failure is None and self.is_store_reachable:
            return LAST_HEARTBEAT
        return 2 * STORE_TIMEOUT if self.is_store_answering else HEARTBEAT_INTERVAL

    @property
    def is_store_answering(self) -> bool:
        """Return whether the store has answered lately: calls just hang if the network is down."""
        return self.is_store_reachable and monotonic() - self.last_answer < STORE_TIMEOUT

    @property
    def holds_store(self) -> bool:
        """Return whether the store is in this process, which is the first one without torchrun."""
        return dist.is_initialized() and dist.get_rank() == 0 and not is_store_of_torchrun()

    def _ask(self, ask: Callable[[], Answer]) -> Answer | None:
        """Return the store's answer; None if there is none in time."""
        if not self.is_store_reachable:
            return None
        seconds = STORE_TIMEOUT if self.is_store_answering else HEARTBEAT_INTERVAL
        return call_with_timeout(seconds, ask)

    def _read_heartbeats(self) -> dict[int, Heartbeat]:
        return self._ask(self.store.read_heartbeats) or {}

    def _exit_text(self, rank: int) -> str | None:
        text = self._ask(lambda: self.store.read_exit(rank))
        return f"{self.names[rank]}: {text}" if text else None

    def _report_gone(self, gone: Sequence[int], broken: str) -> str:
        names = ", ".join(self.names[rank] for rank in gone)
        texts = [text for rank in gone if (text := self._exit_text(rank))]
        reasons = "".join(f"\n  {text}" for text in dict.fromkeys(texts))
        verb = "are" if len(gone) > 1 else "is"
        who = f"{names} {verb} gone" if names else "a rank cannot be reached"
        return self.report_failure(f"{who}: {broken}{reasons}{self.describe_positions()}")

    def _exchange_heartbeats(self) -> None:
        """Write heartbeats and read those of others and failures, until this rank leaves."""
        next_read = 0.0
        while True:
            try:
                self._write_heartbeat()
                if self.failure is None and (failure := self.store.read_failure()) is not None:
                    self.failure = failure
                    self.cancel_waits()
                self.last_answer = monotonic()
                if not self._has_long_wait():
                    self.heartbeats.clear()  # those from before a wait prove nothing in it
                elif monotonic() >= next_read:
                    self._compare_heartbeats(self.store.read_heartbeats())
                    num_intervals = len(self.names) // RANKS_PER_READ
                    next_read = monotonic() + HEARTBEAT_INTERVAL * num_intervals
            except RuntimeError:  # the process that holds the store has ended
                self.is_store_reachable = False
                self.cancel_waits()
                return
            if self.is_over.wait(HEARTBEAT_INTERVAL):
                break
        self._write_exit()

    def _write_heartbeat(self) -> None:
        heartbeat = Heartbeat(
            where=self.position.where + self.user_error,
            time=time(),
            tasks=tuple(self.tasks),
            waits=tuple(wait.what for wait in list(self.waits.values())),
            is_starting=self.is_starting,
            unpredictable_from=self.position.unpredictable_from,
        )
        self.store.write_heartbeat(self.rank, heartbeat)

    def _write_exit(self) -> None:
        """Write why this rank leaves; keep the store alive until others have read it or left.

        No thread can be started at the end of a program, so the watch's own thread does this.
        """
        with suppress(RuntimeError):
            self.store.write_exit(self.rank, self.exit_reason or "")
            end = monotonic() + 2 * HEARTBEAT_INTERVAL
            while (
                self.outlasts_others
                and monotonic() < end
                and not self.store.have_exited(self.others)
            ):
                sleep(HEARTBEAT_INTERVAL / 10)

    def _has_long_wait(self) -> bool:
        """Heartbeats of others are only read then: most waits are over in milliseconds."""
        return any(monotonic() - wait.begun > self.limit / 4 for wait in list(self.waits.values()))

    def _compare_heartbeats(self, found: dict[int, Heartbeat]) -> None:
        for rank, heartbeat in found.items():
            if rank in self.heartbeats and heartbeat != self.heartbeats[rank]:
                self.last_alive[rank] = monotonic()
            self.heartbeats[rank] = heartbeat

    def _check_waits(self) -> None:
        """Cancel waits that have taken too long, until this rank leaves."""
        while not self.is_over.wait(HEARTBEAT_INTERVAL / 2):
            for wait in list(self.waits.values()):
                text = self._overdue_text(wait) if self.failure is None else None
                if text is not None:
                    self.report_failure(text)
                    self.cancel_waits()

    def _overdue_text(self, wait: Wait) -> str | None:
        """Return the failure of a wait that has taken too long; None if it may continue."""
        now = monotonic()
        last = {rank: max(wait.begun, self.last_alive.get(rank, 0.0)) for rank in self.others}
        silent = [rank for rank in self.others if now - last[rank] >= self.limit]
        found = {rank: self.heartbeats.get(rank, Heartbeat()) for rank in self.others}
        starting = [rank for rank in self.others if found[rank].is_starting]
        busy = [rank for rank in self.others if wait.task and wait.task in found[rank].tasks]
        longest = max(self.limit, START_UP_TIMEOUT if starting else CHECKPOINT_TIMEOUT)
        is_excused = len({*starting, *busy}) == len(self.others) or bool(starting)
        if not silent and is_excused and now - wait.begun < longest:
            wait.since = now
        if not silent and now - wait.since < self.limit:
            return None
        absent = silent or [
            rank for rank in self.others if rank not in busy and wait.what not in found[rank].waits
        ]
        names = ", ".join(self.names[rank] for rank in absent or self.others)
        have = "have" if len(absent) > 1 else "has"
        how = f"{names} {have} not " + ("answered" if silent else "taken part")
        if silent and not self.is_store_answering:  # then no heartbeat of any rank arrives
            how = "no heartbeats arrive"
        return (
            f"{self.name} has waited {now - wait.begun:.0f} s for all ranks to share {wait.what}, "
            f"longer than it should: {how}{self.describe_positions()}"
        )


def _complete(future: Future[Answer], call: Callable[[], Answer]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
