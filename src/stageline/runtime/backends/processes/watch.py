"""How ranks in several processes learn of each other's failures: through the rendezvous' store.

    heartbeat   every rank writes twice a second where it stands; a rank that is silent is named
    failure     a rank that fails says why before it raises; the first one to say so is believed
    farewell    a rank that leaves says so, and which exception ended its program, if one did

Two threads of a process do this. One talks to the store, which may block if the network is down.
The other one talks to nobody: it ends waits that have taken too long, whatever the store does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread, main_thread
from time import monotonic, sleep, time
from typing import TypeVar

import torch.distributed as dist

from stageline.schedules.action import Action

FAILURE = "failure"
PAUSE = 0.5  # seconds between two looks
ANSWER = 2.0  # seconds that the store has for an answer, once something is wrong
GRACE = 3.0  # seconds in which a rank that failed can say why, after its connection broke
SILENCE = 3.0  # seconds after which a rank is called silent; it should be heard twice a second
START_UP = 300.0  # seconds that a rank may be later than the others, until their first exchange
PATIENCE = 600.0  # seconds that a rank may take longer than others for a checkpoint, while it lives
MANY = 64  # ranks; more of them look at each other less often, for the sake of the store
NO_ANSWER = "the rendezvous' store does not answer: is the network down?"
Answer = TypeVar("Answer")


@dataclass
class Standing:
    """Where a rank is, for others to see."""

    step: int | None = None
    action: Action | None = None
    unforeseen: str = ""  # from where on the forms of messages are not known before they come

    @property
    def where(self) -> str:
        if self.step is None:
            return "its start"
        return f"{self.action or 'the end'} of step {self.step}"


@dataclass(frozen=True)
class Heard:
    """What a rank said last."""

    where: str = ""
    time: float = 0.0  # of its clock
    tasks: tuple[str, ...] = ()  # that it takes part in, and that may take long
    waits: tuple[str, ...] = ()  # what it waits for others to share
    is_starting: bool = False
    unforeseen: str = ""


@dataclass
class Wait:
    """Of one thread, for all other ranks to take part in something."""

    what: str
    task: str | None  # those who take part in it may take longer than the limit
    begun: float = field(default_factory=monotonic)
    since: float = field(default_factory=monotonic)  # when somebody was last seen to be missing


class Watch:
    """State: what others said last, what is waited for, and the first failure that was told."""

    def __init__(
        self,
        store: dist.distributed_c10d.Store,
        names: Sequence[str],
        rank: int,
        limit: float,
    ) -> None:
        self.store, self.names, self.rank, self.limit = store, names, rank, limit
        self.others = [other for other in range(len(names)) if other != rank]
        self.at = Standing()
        self.stop: Callable[[], None] = lambda: None  # ends all waits of this process
        self.failure: str | None = None
        self.has_answer = True  # from the store
        self.last_answer = monotonic()
        self.is_starting = True
        self.tasks: list[str] = []
        self.waits: dict[int, Wait] = {}
        self.heard: dict[int, Heard] = {}
        self.changed: dict[int, float] = {}  # when another rank was last seen to be alive
        self.notice = ""  # what the user's code raised, if it did
        self.is_over = Event()
        self.last_words: str | None = None
        self.outlasts = False  # the store must not end before others have heard the last words
        self.threads = [
            Thread(target=target, name="stageline-watch", daemon=True)
            for target in (self._look, self._judge)
        ]

    @property
    def name(self) -> str:
        return self.names[self.rank]

    def start(self) -> None:
        """Wait until all ranks are here; raises `TimeoutError` with the names of those missing."""
        for thread in self.threads:
            thread.start()
        end = monotonic() + max(START_UP, self.limit)
        missing = self.others
        while missing and self.failure is None and self.has_answer:
            sought = tuple(missing)
            found = within(
                max(PAUSE, end - monotonic()),
                lambda: [rank for rank in sought if self.store.check([_at(rank)])],  # noqa: B023
            )
            if found is None:
                self.has_answer = False
                return
            missing = [rank for rank in missing if rank not in found]
            if missing and monotonic() >= end:
                raise TimeoutError(", ".join(self.names[rank] for rank in missing))
            sleep(PAUSE / 10 if missing else 0)

    def tell(self, failure: str) -> str:
        """All ranks raise what was told first, also those that fail because of it."""

        def ask() -> str:
            return self.store.compare_set(FAILURE, "", failure).decode()

        if self.failure is None:
            answer = self._ask(ask)
            self.failure = answer or f"{failure}\n  {no_answer(self.names[0])}"
        return self.failure

    def note(self, error: BaseException) -> None:
        """Others that wait for this rank should know what happened to it."""
        self.notice = f", left by {type(error).__name__}: {_text(error)}"

    @contextmanager
    def waiting(self, what: str, task: str | None = None) -> Iterator[None]:
        """Around a wait for all other ranks; it is ended if one of them does not take part.

        Ranks that take part in the same `task` may be at work on it for longer than the limit.
        """
        wait = Wait(what, task)
        self.waits[id(wait)] = wait
        try:
            yield
        finally:
            del self.waits[id(wait)]

    @contextmanager
    def taking_part(self, task: str) -> Iterator[None]:
        """Around something that may take long, and for which the others wait."""
        self.tasks.append(task)
        try:
            yield
        finally:
            self.tasks.remove(task)

    def cause_of(self, broken: str, suspect: int | None = None) -> str:
        """Why a connection broke: what a rank has told, or else which of them is gone.

        `suspect` is the rank at its other end, if that is known.
        """
        begun, before = monotonic(), self._ask(self._listen) or {}
        while self.failure is None and self.has_answer and monotonic() < begun + GRACE:
            if gone := [rank for rank in self.others if self._farewell(rank)]:
                return self._tell_gone(gone, broken)
            sleep(PAUSE / 2)
        if self.failure is not None:
            return self.failure
        now = self._ask(self._listen) or {}
        gone = [rank for rank in self.others if now and now.get(rank) == before.get(rank)]
        return self._tell_gone(gone or [suspect] if suspect is not None else gone, broken)

    def silent_ranks(self) -> str:
        """Who has not been heard lately, for an error; an empty text if there is nobody."""
        found = self._ask(self._listen) or {}
        silent = [r for r, heard in found.items() if time() - heard.time > SILENCE]
        names = ", ".join(self.names[rank] for rank in sorted(silent))
        return f": {names} {'have' if len(silent) > 1 else 'has'} not answered" if names else ""

    def positions(self) -> str:
        """Where each rank stands, and how long ago it said so; an empty text if nobody knows."""
        found = self._ask(self._listen) or {}
        parts = []
        differ = len({heard.unforeseen for heard in found.values()}) > 1
        for rank, heard in sorted(found.items()):
            ago = time() - heard.time
            silence = f" (silent for {ago:.0f} s)" if ago > SILENCE and rank != self.rank else ""
            waits = "".join(f", sharing {what}" for what in heard.waits)
            form = heard.unforeseen if differ else ""  # then ranks expect different messages
            form = f" (its messages depend on data from here on: {form})" if form else ""
            parts.append(f"{self.names[rank]} at {heard.where}{waits}{silence}{form}")
        return f"\n  {', '.join(parts)}" if parts else ""

    def leave(self) -> None:
        """Say that this rank takes part no longer, and what has ended its program."""
        if not self.is_over.is_set():
            is_ending = not main_thread().is_alive()
            self.last_words = self.failure or (
                _end_of_program() if is_ending else "it has closed its pipeline"
            )
            self.outlasts = self.holds_store and (is_ending or self.failure is not None)
            self.is_over.set()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(2 * ANSWER if self.is_answered else PAUSE)

    @property
    def is_answered(self) -> bool:
        """Whether the store does not seem to hang: a network that is down does not say so."""
        return self.has_answer and monotonic() - self.last_answer < ANSWER

    def _ask(self, ask: Callable[[], Answer]) -> Answer | None:
        """None if the store does not answer."""
        if not self.has_answer:
            return None
        return within(ANSWER if self.is_answered else PAUSE, ask)

    @property
    def holds_store(self) -> bool:
        """Whether this process has the store for all of them, as without torchrun the first has."""
        return dist.is_initialized() and dist.get_rank() == 0 and not _has_agent_store()

    def _say_farewell(self) -> None:
        """If the store is in this process, it stays until the others have heard it, or have left.

        No thread can be started at the end of a program, so this is the watch's own.
        """
        with suppress(RuntimeError):
            self.store.set(_left(self.rank), self.last_words or "")
            end = monotonic() + 2 * PAUSE
            keys = [_left(rank) for rank in self.others]
            while self.outlasts and monotonic() < end and not self.store.check(keys):
                sleep(PAUSE / 10)

    def _tell_gone(self, gone: Sequence[int], broken: str) -> str:
        names = ", ".join(self.names[rank] for rank in gone)
        words = [text for rank in gone if (text := self._farewell(rank))]
        reasons = "".join(f"\n  {text}" for text in dict.fromkeys(words))
        verb = "are" if len(gone) > 1 else "is"
        who = f"{names} {verb} gone" if names else "a rank cannot be reached"
        return self.tell(f"{who}: {broken}{reasons}{self.positions()}")

    def _farewell(self, rank: int) -> str | None:
        def ask() -> str:
            key = _left(rank)
            return self.store.get(key).decode() if self.store.check([key]) else ""

        text = self._ask(ask)
        return f"{self.names[rank]}: {text}" if text else None

    def _listen(self) -> dict[int, Heard]:
        """What all ranks said last."""
        keys = {rank: _at(rank) for rank in range(len(self.names))}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(there.values()))
        return {rank: _heard(json.loads(text)) for rank, text in zip(there, texts, strict=True)}

    def _say(self) -> None:
        waits = [wait.what for wait in list(self.waits.values())]
        where = self.at.where + self.notice
        said = (where, time(), self.tasks, waits, self.is_starting, self.at.unforeseen)
        self.store.set(_at(self.rank), json.dumps(said))

    def _look(self) -> None:
        next_listen = 0.0
        while True:
            try:
                self._say()
                if self.failure is None and self.store.check([FAILURE]):
                    self.failure = self.store.get(FAILURE).decode()
                    self.stop()
                self.last_answer = monotonic()
                if not self._is_wait_long():
                    self.heard.clear()  # what was said before a wait is no sign of life in it
                elif monotonic() >= next_listen:
                    self._note(self._listen())
                    next_listen = monotonic() + PAUSE * (len(self.names) // MANY)
            except RuntimeError:  # the store's own process has ended
                self.has_answer = False
                self.stop()
                return
            if self.is_over.wait(PAUSE):
                break
        self._say_farewell()

    def _is_wait_long(self) -> bool:
        """Only then others are looked at: most waits are over in milliseconds."""
        return any(monotonic() - wait.begun > self.limit / 4 for wait in list(self.waits.values()))

    def _note(self, found: dict[int, Heard]) -> None:
        for rank, heard in found.items():
            if rank in self.heard and heard != self.heard[rank]:
                self.changed[rank] = monotonic()
            self.heard[rank] = heard

    def _judge(self) -> None:
        while not self.is_over.wait(PAUSE / 2):
            for wait in list(self.waits.values()):
                text = self._judgement(wait) if self.failure is None else None
                if text is not None:
                    self.tell(text)
                    self.stop()

    def _judgement(self, wait: Wait) -> str | None:
        """What to tell of a wait that has taken too long; None: it may go on."""
        now = monotonic()
        last = {rank: max(wait.begun, self.changed.get(rank, 0.0)) for rank in self.others}
        silent = [rank for rank in self.others if now - last[rank] >= self.limit]
        heard = {rank: self.heard.get(rank, Heard()) for rank in self.others}
        starting = [rank for rank in self.others if heard[rank].is_starting]
        busy = [rank for rank in self.others if wait.task and wait.task in heard[rank].tasks]
        longest = max(self.limit, START_UP if starting else PATIENCE)
        is_excused = len({*starting, *busy}) == len(self.others) or bool(starting)
        if not silent and is_excused and now - wait.begun < longest:
            wait.since = now
        if not silent and now - wait.since < self.limit:
            return None
        absent = silent or [
            rank for rank in self.others if rank not in busy and wait.what not in heard[rank].waits
        ]
        names = ", ".join(self.names[rank] for rank in absent or self.others)
        have = "have" if len(absent) > 1 else "has"
        how = f"{names} {have} not " + ("answered" if silent else "taken part")
        if silent and not self.is_answered:  # so nobody can be heard
            how = "no rank can be heard"
        return (
            f"{self.name} has waited {now - wait.begun:.0f} s for all ranks to share {wait.what}, "
            f"longer than it should: {how}{self.positions()}"
        )


def _heard(said: tuple[str, float, list[str], list[str], bool, str]) -> Heard:
    where, when, tasks, waits, is_starting, unforeseen = said
    return Heard(where, when, tuple(tasks), tuple(waits), is_starting, unforeseen)


def _end_of_program() -> str:
    """What ended it, in the words of the exception that nobody caught."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "its program has ended"
    return f"its program was ended by {type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"


def no_answer(first: str) -> str:
    """What to say when the store does not answer; `first` is the rank that may hold it."""
    if _has_agent_store():
        return NO_ANSWER
    return f"{NO_ANSWER} It is in the process of {first}, which may have ended or stopped."


def _has_agent_store() -> bool:
    """Whether torchrun holds the store, which then outlives the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """None if there is no answer in time."""
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


def _left(rank: int) -> str:
    return f"left/{rank}"
