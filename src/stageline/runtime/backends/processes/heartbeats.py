"""What ranks in several processes write to the rendezvous store about themselves.

at/<rank>     heartbeat: where the rank is, twice a second
failure       why the first rank failed that did
left/<rank>   that the rank has left, and why
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from threading import Thread
from time import time
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from stageline.schedules.action import Action

FAILURE = "failure"
SILENCE = 3.0  # seconds without a heartbeat after which a rank is called silent
UNREACHABLE = "the rendezvous store does not answer: is the network down?"
Answer = TypeVar("Answer")


@dataclass
class RankPosition:
    """The step and action that a rank is at."""

    step: int | None = None
    action: Action | None = None
    # the first layer whose messages depend on data, and why; empty if there is none
    unpredictable_from: str = ""

    @property
    def where(self) -> str:
        if self.step is None:
            return "its start"
        return f"{self.action or 'the end'} of step {self.step}"


@dataclass(frozen=True)
class Heartbeat:
    """The last message of a rank about itself."""

    where: str = ""
    time: float = 0.0  # of its clock
    tasks: tuple[str, ...] = ()  # long tasks that it is busy with
    waits: tuple[str, ...] = ()  # collectives in which it waits for others
    is_starting: bool = False
    unpredictable_from: str = ""

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        where, at, tasks, waits, is_starting, unpredictable_from = json.loads(text)
        return Heartbeat(where, at, tuple(tasks), tuple(waits), is_starting, unpredictable_from)


class RankStore(NamedTuple):
    """The part of the rendezvous store that belongs to one pipeline.

    All methods may block if the network is down, and raise RuntimeError if the store is gone.
    """

    store: dist.distributed_c10d.Store
    num_ranks: int

    def write_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        self.store.set(_heartbeat_key(rank), json.dumps(astuple(heartbeat)))

    def has_heartbeat(self, rank: int) -> bool:
        return self.store.check([_heartbeat_key(rank)])

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank that has written one."""
        ranks = [rank for rank in range(self.num_ranks) if self.has_heartbeat(rank)]
        texts = self.store.multi_get([_heartbeat_key(rank) for rank in ranks])
        return {rank: Heartbeat.from_json(text) for rank, text in zip(ranks, texts, strict=True)}

    def report_failure(self, text: str) -> str:
        """Write a failure unless there is one already; return the first one."""
        return self.store.compare_set(FAILURE, "", text).decode()

    def read_failure(self) -> str | None:
        return self.store.get(FAILURE).decode() if self.store.check([FAILURE]) else None

    def write_exit(self, rank: int, reason: str) -> None:
        self.store.set(_exit_key(rank), reason)

    def read_exit(self, rank: int) -> str:
        """Return why a rank has left; an empty text if it has not."""
        key = _exit_key(rank)
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def have_exited(self, ranks: Sequence[int]) -> bool:
        return self.store.check([_exit_key(rank) for rank in ranks])


def describe_positions(found: dict[int, Heartbeat], names: Sequence[str], own_rank: int) -> str:
    """Return a line with the position of each rank for an error; empty if none is known."""
    parts = []
    differ = len({heartbeat.unpredictable_from for heartbeat in found.values()}) > 1
    for rank, heartbeat in sorted(found.items()):
        age = time() - heartbeat.time
        silence = f" (silent for {age:.0f} s)" if age > SILENCE and rank != own_rank else ""
        waits = "".join(f", sharing {what}" for what in heartbeat.waits)
        layer = heartbeat.unpredictable_from if differ else ""  # ranks expect different messages
        layer = f" (its messages depend on data from {layer})" if layer else ""
        parts.append(f"{names[rank]} at {heartbeat.where}{waits}{silence}{layer}")
    return f"\n  {', '.join(parts)}" if parts else ""


def describe_silent_ranks(found: dict[int, Heartbeat], names: Sequence[str]) -> str:
    """Return which ranks have sent no heartbeat lately, for an error; empty if all have."""
    silent = [names[r] for r, each in sorted(found.items()) if time() - each.time > SILENCE]
    verb = "have" if len(silent) > 1 else "has"
    return f": {', '.join(silent)} {verb} not answered" if silent else ""


def exit_reason() -> str:
    """Return why this program ends: the exception that was not caught, if there is one."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "its program has ended"
    return f"its program was ended by {type(error).__name__}: {error_text(error)}"


def error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"


def store_unreachable(first: str) -> str:
    """Return the error for a store that does not answer; `first` is the name of rank 0."""
    if is_store_of_torchrun():
        return UNREACHABLE
    return f"{UNREACHABLE} It is in the process of {first}, which may have ended or stopped."


def is_store_of_torchrun() -> bool:
    """Return whether torchrun holds the store, which then outlives the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def call_with_timeout(seconds: float, call: Callable[[], Answer]) -> Answer | None:
    """Return the result of a call; None if there is none in time or it raises RuntimeError."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(call())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _heartbeat_key(rank: int) -> str:
    return f"at/{rank}"


def _exit_key(rank: int) -> str:
    return f"left/{rank}"
