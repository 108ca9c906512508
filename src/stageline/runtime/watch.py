"""How ranks in several processes learn of each other's failures: through the rendezvous' store.

A rank that fails says so there before it raises. Every rank has a thread that looks there, and that
tells where its own rank stands, so that a rank which has stopped answering can be named by others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from time import time
from typing import TypeVar

import torch.distributed as dist

FAILURE = "failure"
PAUSE = 0.5  # seconds between two looks
ANSWER = 2.0  # seconds that the store has for an answer, once something is wrong
NO_ANSWER = "the rendezvous' store does not answer: is the network down?"
Answer = TypeVar("Answer")


class Watch:
    """State: the first failure that was told, if any, and whether the store still answers."""

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
        self.has_answer = True  # from the store
        self.is_over = Event()
        self.thread = Thread(target=self._look, name="stageline-watch", daemon=True)
        self.thread.start()

    def tell(self, failure: str) -> str:
        """All ranks raise what was told first, also those that fail because of it."""

        def ask() -> str:
            return self.store.compare_set(FAILURE, "", failure).decode()

        self.failure = _within(ANSWER, ask) or f"{failure}\n  {NO_ANSWER}"
        return self.failure

    def wait_for_failure(self, seconds: float) -> str | None:
        """For a rank that has lost another: who failed usually says why a moment later."""
        end = time() + seconds
        while self.failure is None and time() < end:
            self.is_over.wait(PAUSE / 5)
        return self.failure

    def positions(self) -> dict[int, tuple[str, float]]:
        """Where each rank was last, and how many seconds ago it said so."""
        return _within(ANSWER, self._positions) or {}

    def _positions(self) -> dict[int, tuple[str, float]]:
        found = {}
        for rank in range(self.num_ranks):
            key = _at(rank)
            if self.store.check([key]):
                where, when = json.loads(self.store.get(key))
                found[rank] = where, max(0.0, time() - when)
        return found

    def close(self) -> None:
        self.is_over.set()
        self.thread.join(ANSWER)

    def _look(self) -> None:
        while not self.is_over.wait(PAUSE):
            try:
                self.store.set(_at(self.rank), json.dumps((self.where(), time())))
                if self.failure is None and self.store.check([FAILURE]):
                    self.failure = self.store.get(FAILURE).decode()
                    self.stop()
            except RuntimeError:  # the store's own process has ended
                self.has_answer = False
                self.stop()
                return


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """None if there is no answer in time: a network that is down does not say so."""
    answers: list[Answer] = []

    def wait() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    asking = Thread(target=wait, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def _at(rank: int) -> str:
    return f"at/{rank}"
