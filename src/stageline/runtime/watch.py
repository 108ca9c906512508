"""How ranks in several processes learn of each other's failures: through the rendezvous' store.

A rank that fails says so there before it raises. Every rank has a thread that looks there, and that
tells where its own rank stands, so that a rank which has stopped answering can be named by others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Event, Thread
from time import time

import torch.distributed as dist

FAILURE = "failure"
PAUSE = 0.25  # seconds between two looks


class Watch:
    """State: the first failure that was told, if any."""

    def __init__(
        self,
        store: dist.distributed_c10d.Store,
        rank: int,
        num_ranks: int,
        where: Callable[[], str],
        stop: Callable[[], None],
    ) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self.where, self.stop = where, stop
        self.failure: str | None = None
        self.is_over = Event()
        self.thread = Thread(target=self._look, name="stageline-watch", daemon=True)
        self.thread.start()

    def tell(self, failure: str) -> str:
        """All ranks raise what was told first, also those that fail because of it."""
        told = self.store.compare_set(FAILURE, "", failure)
        self.failure = told.decode()
        return self.failure

    def wait_for_failure(self, seconds: float) -> str | None:
        """For a rank that has lost another: who failed usually says why a moment later."""
        end = time() + seconds
        while self.failure is None and time() < end:
            self.is_over.wait(PAUSE / 5)
        return self.failure

    def positions(self) -> dict[int, tuple[str, float]]:
        """Where each rank was last, and how many seconds ago it said so."""
        found = {}
        for rank in range(self.num_ranks):
            key = _at(rank)
            if self.store.check([key]):
                where, when = json.loads(self.store.get(key))
                found[rank] = where, max(0.0, time() - when)
        return found

    def close(self) -> None:
        self.is_over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.is_over.wait(PAUSE):
            try:
                self.store.set(_at(self.rank), json.dumps((self.where(), time())))
                if self.failure is None and self.store.check([FAILURE]):
                    self.failure = self.store.get(FAILURE).decode()
                    self.stop()
            except RuntimeError:  # the store's own process has ended
                self.stop()
                return


def _at(rank: int) -> str:
    return f"at/{rank}"
