"""A thread for each rank, all in this process.

A step in which a layer raised ends with one error that names the rank, the layer, the action and
the cause, after every other rank has stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from threading import Condition

import torch

from stageline.errors import ModelError, StageError
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.caller_events import CallerEvents, hand_over
from stageline.runtime.backends.device_ranks import device_ranks
from stageline.runtime.backends.failures import stage_error
from stageline.runtime.backends.local_collectives import LocalCollectives
from stageline.runtime.backends.mailbox import Mailbox, PostOffice, RankStopped
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.minibatch import Actions, MiniBatch, Stream
from stageline.runtime.exactness.caller_context import CallerContext
from stageline.torch_private import is_interpreter_exiting

LOOK = 0.5  # seconds after which a rank that waits looks whether the interpreter waits for it


class ThreadsBackend:
    """Run each rank in a thread, kept from step to step."""

    def __init__(self, accelerators: Sequence[Accelerator | None]) -> None:
        self.collectives = LocalCollectives()
        self.accelerators, self.devices = accelerators, device_ranks(accelerators)
        self.is_closed = False
        self.pool = ThreadPoolExecutor(len(accelerators), thread_name_prefix="stageline-rank")

    def start(self, loop: Loop, stream: Stream) -> ThreadsRun:
        if self.is_closed:
            raise ModelError("the pipeline is closed, and its threads have ended: build another")
        return ThreadsRun(self, loop, stream)

    def close(self) -> None:
        self.is_closed = True
        self.pool.shutdown()


class Gate:
    """Makes rank threads wait for mini-batches, and the caller for the ranks.

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
        """Let ranks finish what was fed, or stop them `at_once` because one of them failed."""
        with self.changed:
            self.is_over = True
            self.is_stopped |= at_once
            self.changed.notify_all()

    def passes(self, segment: int) -> bool:
        """Wait for a mini-batch; return whether there is anything to do in this segment."""
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
        """Wait until all ranks are through with a segment, or one of them has failed."""
        with self.changed:
            self.changed.wait_for(lambda: min(self.done) > segment or self.is_stopped)


class ThreadsRun:
    """A stream. State: the threads that work, the messages between them, and who failed."""

    def __init__(self, backend: ThreadsBackend, loop: Loop, stream: Stream) -> None:
        self.backend, self.loop, self.stream = backend, loop, stream
        self.num_threads = torch.get_num_threads()
        self.gate = Gate(loop.num_ranks, stream.lag)
        self.post = PostOffice(loop.period.placement, backend.devices)
        self.events = CallerEvents(backend.accelerators)
        self.failures: list[StageError] = []
        context = CallerContext.current()
        ranks = range(loop.num_ranks)
        self.futures = [backend.pool.submit(context.run, self._work, rank) for rank in ranks]

    def feed(self, minibatch: MiniBatch) -> None:
        self.stream.add(minibatch)
        self.events.feed(minibatch.position)
        self.gate.feed()

    def wait(self, position: int) -> None:
        segment = position + self.stream.lag
        with self._stopping_all():
            self.gate.wait(segment)
        if self.gate.is_stopped:
            self.drain()
        self.events.wait(segment)
        self._hand_over(self.stream.minibatches[position])

    def _hand_over(self, minibatch: MiniBatch) -> None:
        """Hand results to the caller while the ranks that computed them continue."""
        placement, accelerators = self.loop.period.placement, self.backend.accelerators
        hand_over(accelerators[placement[-1]], minibatch.losses.values())
        for stage, update in minibatch.updates.items():
            hand_over(accelerators[placement[stage]], [update.norm])

    def drain(self) -> None:
        self.gate.end()
        with self._stopping_all():
            for future in self.futures:
                future.result()
        self.events.wait(self.stream.length + self.stream.lag)
        try:
            if self.failures:
                raise self.failures[0]
        finally:
            self.failures.clear()  # an error holds this frame, and would hold itself

    def _work(self, rank: int) -> None:
        # OpenMP counts for each thread anew, and a convolution's sums depend on that count
        torch.set_num_threads(self.num_threads)
        try:
            device = self.backend.devices[rank]
            if device is None:
                self._run_segments(rank)
            else:
                with device.working(lambda: self.stream.now.get(rank)):
                    self._run_segments(rank)
        except RankStopped:
            pass  # another rank failed
        except BaseException as error:
            # kept by no name of this frame, which the error holds
            self.failures.append(stage_error(self.loop, self.stream, rank, error))
            self.failures[-1].__cause__ = error
            self._stop()

    def _run_segments(self, rank: int) -> None:
        for segment in count():
            if not self.gate.passes(segment):
                return
            self.events.begin(rank, segment)
            try:
                actions = self.loop.run(rank, segment, self.stream, self.post)
                run_blocking(actions, self.post.mailboxes[rank])
            finally:  # also if it fails: the caller may go on with the same weights
                self.events.end(rank, segment)
            self.gate.finished(rank)

    def _stop(self) -> None:
        self.post.close()
        self.gate.end(at_once=True)

    @contextmanager
    def _stopping_all(self) -> Iterator[None]:
        """Stop all ranks at Ctrl-C: none may go on behind the caller's back."""
        try:
            yield
        except BaseException:
            self._stop()
            wait(self.futures)
            raise


def run_blocking(actions: Actions, mailbox: Mailbox) -> None:
    """Run a rank to the end; raise `RankStopped` if another rank's failure ends it before."""
    try:
        need = next(actions)
        while True:
            need = actions.send(mailbox.take(need))
    except StopIteration:
        pass
    except RankStopped:
        actions.close()
        raise
