"""Who runs the ranks of one process: one thread in turns, or a thread for each.

Both end a step in which a layer raised with one error that names the rank, the layer, the action
and the cause, after every other rank has stopped.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from stageline.errors import StageError
from stageline.runtime.executor import Executor, Rank, Step
from stageline.runtime.mailbox import Mailbox, Stopped
from stageline.schedules.action import Action, Kind

WORDS = {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.B: "backward"}


class Driver(Protocol):
    """Runs one step of all ranks of this process to its end."""

    def run(self, executor: Executor, step: Step) -> None: ...

    def close(self) -> None: ...


class Serial:
    """All ranks in the calling thread: each goes on until it needs what is not there yet."""

    def run(self, executor: Executor, step: Step) -> None:
        messages: dict[Action, object] = {}
        num_ranks = len(executor.program.actions)
        ranks = {r: executor.run(r, step, messages.__setitem__) for r in range(num_ranks)}
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
    message: object,
) -> None:
    try:
        needs[rank] = run.send(message)
    except StopIteration:
        del needs[rank]
    except Exception as error:
        raise _failure(executor, step, rank, error) from error


class Threads:
    """A thread for each rank, kept from step to step."""

    def __init__(self, num_ranks: int) -> None:
        self.pool = ThreadPoolExecutor(num_ranks, thread_name_prefix="stageline-rank")

    def run(self, executor: Executor, step: Step) -> None:
        program = executor.program
        mailboxes = [Mailbox() for _ in program.actions]
        failures: list[StageError] = []
        num_threads = torch.get_num_threads()

        def send(action: Action, message: object) -> None:
            mailboxes[program.placement[action.peer]].put(action, message)

        def work(rank: int) -> None:
            # OpenMP counts for each thread anew, and a convolution's sums depend on that count
            torch.set_num_threads(num_threads)
            run = executor.run(rank, step, send)
            try:
                need = next(run, None)
                while need is not None:
                    need = _resume(run, mailboxes[rank].take(need))
            except Stopped:
                run.close()
            except BaseException as error:
                failures.append(_failure(executor, step, rank, error))
                failures[-1].__cause__ = error
                for mailbox in mailboxes:
                    mailbox.close()

        for future in [self.pool.submit(work, rank) for rank in range(len(mailboxes))]:
            future.result()
        if failures:
            raise failures[0]

    def close(self) -> None:
        self.pool.shutdown()


def _resume(run: Rank, message: object) -> Action | None:
    try:
        return run.send(message)
    except StopIteration:
        return None


def _failure(executor: Executor, step: Step, rank: int, error: BaseException) -> StageError:
    action = step.now[rank]
    layer = executor.stages[action.stage].at_work
    others = [(r, a) for r, a in sorted(step.now.items()) if r != rank]
    stopped = ", ".join(f"rank {r} at {a}" for r, a in others) or "none other"
    return StageError(
        f"rank {rank} failed in layer {layer!r} at {action} "
        f"({WORDS[action.kind]}, micro-batch {action.microbatch})\n"
        f"  {type(error).__name__}: {error}\n"
        f"  stopped: {stopped}"
    )
