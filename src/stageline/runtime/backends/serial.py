"""All ranks in the calling thread: each goes on until it needs what is not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.carry import carried
from stageline.runtime.backends.failures import stage_error
from stageline.runtime.backends.local_collectives import LocalCollectives
from stageline.runtime.backends.mailbox import Brought, Meetings, Numbers
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.minibatch import Actions, Message, MessageKey, MiniBatch, Stream
from stageline.schedules.action import Action
from stageline.schedules.placement import Placement


class SerialBackend:
    """Run ranks in turns, so that a debugger sees one thing after another."""

    def __init__(self, accelerators: Sequence[Accelerator | None]) -> None:
        self.collectives = LocalCollectives()
        self.accelerators = accelerators

    def start(self, loop: Loop, stream: Stream) -> SerialRun:
        return SerialRun(loop, stream, self.accelerators)

    def close(self) -> None:
        """Do nothing: there are no threads to end."""


class SerialTransport:
    """Messages that wait for ranks that take turns. State: the messages."""

    def __init__(self, placement: Placement, accelerators: Sequence[Accelerator | None]) -> None:
        self.placement, self.accelerators = placement, accelerators
        self.has_devices = any(accelerators)
        self.messages: dict[MessageKey, Message] = {}
        self.meetings = Meetings(len(accelerators))

    def send(self, key: MessageKey, message: Message) -> None:
        if self.has_devices:
            source, target = self.placement[key[1].stage], self.placement[key[1].peer]
            message = message._replace(contents=self._carry(target, message.contents, source))
        self.messages[key] = message

    def expect(self, minibatch: int, receive: Action) -> None:
        """Do nothing: a rank that needs a message looks for it."""

    def meet(self, rank: int, key: MessageKey, numbers: Numbers) -> None:
        everyone = self.meetings.join(key, Brought(rank, numbers))
        if everyone is not None:
            ranks = range(len(self.accelerators)) if self.has_devices else ()
            fetches = [partial(self._carry, rank) for rank in ranks]
            self.messages.update(self.meetings.answers(key, everyone, fetches))

    def _carry(self, target: int, values: Any, source: int, _: object = None) -> Any:
        return carried(values, self.accelerators[source], self.accelerators[target])


class SerialRun:
    """A stream, segment by segment: no rank needs what another does in a later one."""

    def __init__(
        self, loop: Loop, stream: Stream, accelerators: Sequence[Accelerator | None]
    ) -> None:
        self.loop, self.stream = loop, stream
        self.transport = SerialTransport(loop.period.placement, accelerators)
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
