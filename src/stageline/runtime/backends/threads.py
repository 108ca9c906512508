"""Who runs the ranks of one process: one thread in turns, or a thread for each.

Both end a step in which a layer raised with one error that names the rank, the layer, the action
and the cause, after every other rank has stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from threading import Condition
from typing import Protocol

import torch

from stageline.errors import ModelError, StageError
from stageline.runtime.backends.mailbox import Mailbox, Poll, PostOffice, Stopped
from stageline.runtime.devices import current
from stageline.runtime.engine.loop import (
    Executor,
    Message,
    Parcel,
    Rank,
    Step,
    Stream,
)
from stageline.runtime.exactness.caller_context import CallerContext
from stageline.runtime.optimizers.late_clipping import Norms
from stageline.runtime.optimizers.speculation import norms_for
from stageline.schedules.action import WHOLE_BATCH, Action, Kind
from stageline.torch_private import is_interpreter_exiting

LOOK = 0.5  # seconds after which a rank that waits looks whether the interpreter waits for it
WORDS = {
    Kind.F: "forward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.B: "backward",
    Kind.STEP: "optimizer step",
}


class Running(Protocol):
    """A stream on its way through the ranks of this process."""

    def feed(self, step: Step) -> None:
        """One more mini-batch; ranks may begin it."""

    def wait(self, number: int) -> None:
        """Until all ranks here are done with a mini-batch; enough of them must have followed it."""

    def drain(self) -> None:
        """No more will come: wait until all is done."""


class Driver(Protocol):
    """Runs the ranks of this process."""

    def start(self, executor: Executor, stream: Stream) -> Running: ...

    def close(self) -> None: ...


def run_once(driver: Driver, executor: Executor, step: Step) -> Stream:
    """One mini-batch, to its end."""
    stream = Stream(step.purpose, lag=executor.period.lag)
    running = driver.start(executor, stream)
    running.feed(step)
    running.drain()
    return stream


class Desk:
    """Where ranks that take turns leave messages for each other."""

    def __init__(self, num_ranks: int) -> None:
        self.messages: dict[Parcel, Message] = {}
        self.num_ranks, self.poll = num_ranks, Poll(num_ranks)

    def send(self, parcel: Parcel, message: Message) -> None:
        self.messages[parcel] = message

    def expect(self, minibatch: int, receive: Action) -> None:
        """Nothing to do: whoever needs it looks."""

    def reduce(self, stage: int) -> None:
        """There is one replica."""

    def tell(self, rank: int, minibatch: int, norms: Norms) -> None:  # noqa: ARG002  counted
        if everywhere := self.poll.tell(minibatch, norms):
            for other in range(self.num_ranks):
                self.messages[minibatch, norms_for(other)] = Message(everywhere, 0.0)


class Serial:
    """All ranks in the calling thread: each goes on until it needs what is not there yet."""

    def start(self, executor: Executor, stream: Stream) -> Running:
        return InTurns(executor, stream)

    def close(self) -> None:
        pass


class InTurns:
    """Segment by segment: no rank needs what another does in a later one."""

    def __init__(self, executor: Executor, stream: Stream) -> None:
        self.executor, self.stream = executor, stream
        self.desk = Desk(executor.num_ranks)
        self.is_inside = False  # of a segment; Ctrl-C leaves it unfinished

    def feed(self, step: Step) -> None:
        self.stream.add(step)
        self._run(self.stream.length - 1)

    def wait(self, number: int) -> None:
        """It is done."""

    def drain(self) -> None:
        if not self.is_inside:
            for segment in segments_to_drain(self.stream):
                self._run(segment)

    def _run(self, segment: int) -> None:
        self.is_inside = True
        messages = self.desk.messages
        ranks = {
            rank: self.executor.run(rank, segment, self.stream, self.desk)
            for rank in range(self.executor.num_ranks)
        }
        needs: dict[int, Parcel | None] = dict.fromkeys(ranks)
        while needs:
            for rank, need in list(needs.items()):
                if need is None or need in messages:
                    message = None if need is None else messages.pop(need)
                    self._advance(rank, ranks[rank], needs, message)
        self.is_inside = False

    def _advance(
        self, rank: int, run: Rank, needs: dict[int, Parcel | None], message: Message | None
    ) -> None:
        try:
            needs[rank] = next(run) if message is None else run.send(message)
        except StopIteration:
            del needs[rank]
        except Exception as error:
            raise _failure(self.executor, self.stream, rank, error) from error


def segments_to_drain(stream: Stream) -> range:
    """Those that no mini-batch begins."""
    return range(stream.length, stream.length + stream.lag if stream.length else 0)


class Threads:
    """A thread for each rank, kept from step to step."""

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self.devices = devices
        self.is_closed = False
        self.pool = ThreadPoolExecutor(len(devices), thread_name_prefix="stageline-rank")

    def start(self, executor: Executor, stream: Stream) -> Running:
        if self.is_closed:
            raise ModelError("the pipeline is closed, and its threads have ended: build another")
        return SideBySide(self, executor, stream)

    def close(self) -> None:
        self.is_closed = True
        self.pool.shutdown()


class Gate:
    """Where rank threads wait for mini-batches, and the caller for the ranks.

    State: how many mini-batches came, whether more will, and how far each rank is.
    """

    def __init__(self, num_ranks: int, lag: int) -> None:
        self.changed = Condition()
        self.lag, self.num_fed = lag, 0
        self.is_over = self.is_stopped = False
        self.done = [0] * num_ranks  # segments

    def feed(self) -> None:
        with self.changed:
            self.num_fed += 1
            self.changed.notify_all()

    def end(self, *, at_once: bool = False) -> None:
        """No more will come; `at_once`, if a rank failed and nothing may go on."""
        with self.changed:
            self.is_over = True
            self.is_stopped |= at_once
            self.changed.notify_all()

    def passes(self, segment: int) -> bool:
        """Wait for a mini-batch; whether there is anything to do in this segment."""
        with self.changed:
            while not self.changed.wait_for(lambda: segment < self.num_fed or self.is_over, LOOK):
                if is_interpreter_exiting():  # in the middle of a stream
                    return False
            return not self.is_stopped and segment < self.num_fed + self.lag and self.num_fed > 0

    def finished(self, rank: int) -> None:
        with self.changed:
            self.done[rank] += 1
            self.changed.notify_all()

    def wait(self, segment: int) -> None:
        """Until all ranks are through with a segment, or one of them has failed."""
        with self.changed:
            self.changed.wait_for(lambda: min(self.done) > segment or self.is_stopped)


class SideBySide:
    """State: the threads that work, the messages between them, and who failed."""

    def __init__(self, home: Threads, executor: Executor, stream: Stream) -> None:
        self.home, self.executor, self.stream = home, executor, stream
        self.num_threads = torch.get_num_threads()
        self.gate = Gate(executor.num_ranks, stream.lag)
        self.post = PostOffice(executor.period.placement, executor.num_ranks)
        self.failures: list[StageError] = []
        ours = CallerContext.current()
        ranks = range(executor.num_ranks)
        self.futures = [home.pool.submit(ours.run, self._work, rank) for rank in ranks]

    def feed(self, step: Step) -> None:
        self.stream.add(step)
        self.gate.feed()

    def wait(self, number: int) -> None:
        with self._stopping_all():
            self.gate.wait(number + self.stream.lag)
        if self.gate.is_stopped:
            self.drain()

    def drain(self) -> None:
        self.gate.end()
        with self._stopping_all():
            for future in self.futures:
                future.result()
        try:
            if self.failures:
                raise self.failures[0]
        finally:
            self.failures.clear()  # an error holds this frame, and would hold itself

    def _work(self, rank: int) -> None:
        # OpenMP counts for each thread anew, and a convolution's sums depend on that count
        torch.set_num_threads(self.num_threads)
        try:
            with current(self.home.devices[rank]):
                for segment in count():
                    if not self.gate.passes(segment):
                        return
                    run = self.executor.run(rank, segment, self.stream, self.post)
                    run_blocking(run, self.post.mailboxes[rank])
                    self.gate.finished(rank)
        except Stopped:
            pass  # another rank failed
        except BaseException as error:
            # kept by no name of this frame, which the error holds
            self.failures.append(_failure(self.executor, self.stream, rank, error))
            self.failures[-1].__cause__ = error
            self._stop()

    def _stop(self) -> None:
        self.post.close()
        self.gate.end(at_once=True)

    @contextmanager
    def _stopping_all(self) -> Iterator[None]:
        """Ctrl-C: no rank may go on behind the caller's back."""
        try:
            yield
        except BaseException:
            self._stop()
            wait(self.futures)
            raise


def run_blocking(run: Rank, mailbox: Mailbox) -> None:
    """To the end; raises `Stopped` if another rank's failure ends it before."""
    try:
        need = next(run)
        while True:
            need = run.send(mailbox.take(need))
    except StopIteration:
        pass
    except Stopped:
        run.close()
        raise


def _failure(executor: Executor, stream: Stream, rank: int, error: BaseException) -> StageError:
    others = [(r, a) for r, (_, a) in sorted(stream.now.items()) if r != rank]
    stopped = ", ".join(f"rank {r} at {a}" for r, a in others) or "none other"
    return StageError(f"{failure_text(executor, stream, rank, error)}\n  stopped: {stopped}")


def failure_text(executor: Executor, stream: Stream, rank: int, error: BaseException) -> str:
    """Which rank, layer, action and micro-batch, and what happened."""
    minibatch, action = stream.now[rank]
    layer = executor.stages[action.stage].running_layer
    which = "" if action.microbatch == WHOLE_BATCH else f", micro-batch {action.microbatch}"
    which += f" of mini-batch {minibatch}" if stream.stepper is not None else ""
    return (
        f"rank {rank} failed in layer {layer!r} at {action} "
        f"({WORDS.get(action.kind, action.kind)}{which})\n"
        f"  {type(error).__name__}: {_text(error)}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"
