"""This process's connection to the others: it is open, closed, or has failed for everyone."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch.distributed as dist

from stageline.errors import ModelError, StageError, StagelineError
from stageline.runtime.backends.processes.channels.channel import Channel
from stageline.runtime.backends.processes.failure_watch import FailureWatch
from stageline.runtime.backends.processes.groups import ProcessGroups
from stageline.runtime.backends.processes.messages.gloo_messages import Outgoing
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.schedules.action import Action


class Connection:
    """Process groups, the watch over all ranks, and messages on their way out."""

    def __init__(self, groups: ProcessGroups, limit: float) -> None:
        self.groups, self.watch, self.limit = groups, groups.watch, limit
        self.rank = dist.get_rank(groups.pipeline)
        self.outgoing = Outgoing(groups)
        self.channels: list[Channel] = []  # that begin or end here
        # also when it is garbage collected, and before the interpreter goes: no thread may be
        # inside of torch then
        self.close = weakref.finalize(self, _close, self.watch, self.outgoing, self.channels)

    def check(self) -> None:
        """Raise if nothing can be done any more."""
        if self.watch.failure is not None:
            raise self.failed(self.watch.failure)
        if not self.close.alive:
            raise ModelError("the pipeline is closed: build another, and load a checkpoint into it")

    @contextmanager
    def guarded(self, what: str, task: str | None = None) -> Iterator[None]:
        """Raise on all ranks if one does not take part in something, and name that rank.

        `task` names what may keep a rank busy for long.
        """
        self.check()
        try:
            with self.watch.waiting(what, task):
                yield
        except StagelineError:
            raise
        except (RuntimeError, RankLost) as error:  # a connection broke, or the watch ended the wait
            raise self.failed(
                self.watch.cause_of(
                    f"its connection broke while {self.watch.name} waited for all ranks to share "
                    f"{what} ({_first_sentence(error)})"
                )
            ) from None
        except BaseException as error:
            # others are in the middle of it too, so nothing that follows would fit together
            self.failed(
                self.watch.report_failure(
                    f"{self.watch.name} was interrupted while all ranks shared {what}\n"
                    f"  {type(error).__name__}: {error}"
                )
            )
            raise

    def failed(self, text: str) -> StageError:
        """Close all connections, so that no thread of theirs or ours goes on waiting."""
        self.groups.hang_up()
        self.close()
        return StageError(text)

    def lost(self, lost: RankLost, need: Action | None, asked: float) -> StageError:
        """Return the error for a message that did not come, with who failed first if known."""
        if need is not None and perf_counter() - asked >= self.limit:
            return self.failed(
                self.watch.report_failure(
                    f"{self.watch.name} has waited {self.limit:g} s for {need}, longer than it "
                    f"should{self.watch.describe_silent_ranks()}{self.watch.describe_positions()}"
                )
            )
        source = dist.get_global_rank(self.groups.pipeline, lost.rank)
        return self.failed(
            self.watch.cause_of(
                f"its connection broke while {self.watch.name} was at {self.watch.position.where} "
                f"({_first_sentence(lost)})",
                dist.get_group_rank(self.groups.everyone, source),
            )
        )


def _close(watch: FailureWatch, outgoing: Outgoing, channels: list[Channel]) -> None:
    watch.leave()
    outgoing.close()
    for channel in channels:
        channel.close()


def _first_sentence(error: BaseException) -> str:
    """Return an error's first sentence: before it gloo has a place in C++, behind it advice.

    >>> _first_sentence(RuntimeError("[pair.cc:9] Connection closed by peer. See\\n[the manual]"))
    'Connection closed by peer'
    """
    return re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
