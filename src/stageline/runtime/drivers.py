"""Who runs the ranks of one process: one thread in turns, or a thread for each.

Both end a step in which a layer raised with one error that names the rank, the layer, the action
and the cause, after every other rank has stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import torch

from stageline.errors import ModelError, StageError
from stageline.runtime.devices import current
from stageline.runtime.executor import Executor, Message, Rank, Step
from stageline.runtime.mailbox import Mailbox, PostOffice, Stopped
from stageline.schedules.action import Action, Kind

WORDS = {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.B: "backward"}


class Driver(Protocol):
    """Runs one step of all ranks of this process to its end."""

    def run(self, executor: Executor, step: Step) -> None: ...

    def close(self) -> None: ...


class Desk:
    """Where ranks that take turns leave messages for each other."""

    def __init__(self) -> None:
        self.messages: dict[Action, Message] = {}

    def send(self, send: Action, message: Message) -> None:
        self.messages[send] = message

    def expect(self, receive: Action) -> None:
        """Nothing to do: whoever needs it looks."""

    def reduce(self, stage: int) -> None:
        """There is one replica."""


class Serial:
    """All ranks in the calling thread: each goes on until it needs what is not there yet."""

    def run(self, executor: Executor, step: Step) -> None:
        desk = Desk()
        messages = desk.messages
        num_ranks = len(executor.program.actions)
        ranks = {r: executor.run(r, step, desk) for r in range(num_ranks)}
        needs: dict[int, Action | None] = dict.fromkeys(ranks)
        while needs:
            for rank, need in list(needs.items()):
                if need is None or need in messages:
                    message = None if need is None else messages.pop(need)
                    _advance(executor, step, rank, ranks[rank], needs, message)

    def close(self) -> None:
        pass


def _advance(
    executor: Executor,
    step: Step,
    rank: int,
    run: Rank,
    needs: dict[int, Action | None],
    message: Message | None,
) -> None:
    try:
        needs[rank] = next(run) if message is None else run.send(message)
    except StopIteration:
        del needs[rank]
    except Exception as error:
        raise _failure(executor, step, rank, error) from error


class Threads:
    """A thread for each rank, kept from step to step."""

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self.devices = devices
        self.is_closed = False
        self.pool = ThreadPoolExecutor(len(devices), thread_name_prefix="stageline-rank")

    def run(self, executor: Executor, step: Step) -> None:
        if self.is_closed:
            raise ModelError("the pipeline is closed, and its threads have ended: build another")
        num_ranks, num_threads = len(executor.program.actions), torch.get_num_threads()
        post = PostOffice(executor.program.placement, num_ranks)
        failures: list[StageError] = []

        def work(rank: int) -> None:
            # OpenMP counts for each thread anew, and a convolution's sums depend on that count
            torch.set_num_threads(num_threads)
            try:
                with current(self.devices[rank]):
                    run_blocking(executor.run(rank, step, post), post.mailboxes[rank])
            except BaseException as error:
                post.close()
                failures.append(_failure(executor, step, rank, error))
                failures[-1].__cause__ = error

        futures = [self.pool.submit(work, rank) for rank in range(num_ranks)]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C: no rank may go on behind the caller's back
            post.close()
            wait(futures)
            raise
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # an error holds this frame, and would hold itself

    def close(self) -> None:
        self.is_closed = True
        self.pool.shutdown()


def run_blocking(run: Rank, mailbox: Mailbox) -> None:
    """To the end, or to where another rank's failure leaves it."""
    try:
        need = next(run)
        while True:
            need = run.send(mailbox.take(need))
    except StopIteration:
        pass
    except Stopped:
        run.close()


def _failure(executor: Executor, step: Step, rank: int, error: BaseException) -> StageError:
    others = [(r, a) for r, a in sorted(step.now.items()) if r != rank]
    stopped = ", ".join(f"rank {r} at {a}" for r, a in others) or "none other"
    return StageError(f"{failure_text(executor, step, rank, error)}\n  stopped: {stopped}")


def failure_text(executor: Executor, step: Step, rank: int, error: BaseException) -> str:
    """Which rank, layer, action and micro-batch, and what happened."""
    action = step.now[rank]
    layer = executor.stages[action.stage].at_work
    return (
        f"rank {rank} failed in layer {layer!r} at {action} "
        f"({WORDS.get(action.kind, action.kind)}, micro-batch {action.microbatch})\n"
        f"  {type(error).__name__}: {_text(error)}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"
