"""All ranks in the calling thread: each goes on until it needs what is not there yet."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stageline.runtime.backends.failures import stage_error
from stageline.runtime.backends.local_collectives import LocalCollectives
from stageline.runtime.backends.mailbox import Meetings
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.minibatch import Actions, Message, MessageKey, MiniBatch, Stream
from stageline.schedules.action import Action


class SerialBackend:
    """Run ranks in turns, so that a debugger sees one thing after another."""

    def __init__(self) -> None:
        self.collectives = LocalCollectives()

    def start(self, loop: Loop, stream: Stream) -> SerialRun:
        return SerialRun(loop, stream)

    def close(self) -> None:
        """Do nothing: there are no threads to end."""


class SerialTransport:
    """Messages that wait for ranks that take turns. State: the messages."""

    def __init__(self, num_ranks: int) -> None:
        self.messages: dict[MessageKey, Message] = {}
        self.meetings = Meetings(num_ranks)

    def send(self, key: MessageKey, message: Message) -> None:
        self.messages[key] = message

    def expect(self, minibatch: int, receive: Action) -> None:
        """Do nothing: a rank that needs a message looks for it."""

    def meet(self, rank: int, key: MessageKey, numbers: Mapping[int, Tensor]) -> None:  # noqa: ARG002
        everyone = self.meetings.join(key, numbers)
        if everyone is not None:
            self.messages.update(self.meetings.answers(key, everyone))


class SerialRun:
    """A stream, segment by segment: no rank needs what another does in a later one."""

    def __init__(self, loop: Loop, stream: Stream) -> None:
        self.loop, self.stream = loop, stream
        self.transport = SerialTransport(loop.num_ranks)
        self.is_inside = False  # of a segment; Ctrl-C leaves it unfinished

    def feed(self, minibatch: MiniBatch) -> None:
        self.stream.add(minibatch)
        self._run(self.stream.length - 1)

    def wait(self, position: int) -> None:
        """Do nothing: `feed` returns when it is done."""

    def drain(self) -> None:
        if not self.is_inside:
            for segment in self.stream.segments_to_drain:
                self._run(segment)

    def _run(self, segment: int) -> None:
        self.is_inside = True
        messages = self.transport.messages
        ranks = {
            rank: self.loop.run(rank, segment, self.stream, self.transport)
            for rank in range(self.loop.num_ranks)
        }
        needs: dict[int, MessageKey | None] = dict.fromkeys(ranks)
        while needs:
            for rank, need in list(needs.items()):
                if need is None or need in messages:
                    message = None if need is None else messages.pop(need)
                    self._advance(rank, ranks[rank], needs, message)
        self.is_inside = False

    def _advance(
        self,
        rank: int,
        actions: Actions,
        needs: dict[int, MessageKey | None],
        message: Message | None,
    ) -> None:
        try:
            needs[rank] = next(actions) if message is None else actions.send(message)
        except StopIteration:
            del needs[rank]
        except Exception as error:
            raise stage_error(self.loop, self.stream, rank, error) from error
