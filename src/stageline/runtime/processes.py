"""One rank in this process, the others elsewhere: messages travel over a process group.

    rank thread      expect ─► irecv posted        send ─► packed, isend
    a thread a peer       waits for it ─► mailbox       a thread waits for sends to leave

The rank itself waits only at its mailbox, where a failure of another rank reaches it too.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.errors import ModelError, StageError
from stageline.model.layers import LayerSequence, Value
from stageline.runtime import wire
from stageline.runtime.devices import current
from stageline.runtime.drivers import failure_text
from stageline.runtime.executor import Executor, Message, Step
from stageline.runtime.mailbox import Lost, Mailbox, Stopped
from stageline.runtime.mesh import Place
from stageline.runtime.shapes import Form, Shape, value_shapes
from stageline.runtime.watch import NO_ANSWER, Watch
from stageline.schedules.action import Action, Kind

SENDS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
SILENCE = 3.0  # seconds after which a rank counts as silent; it should be heard four times a second
# tags: of messages whose form both sides know, of all others, and of none
KNOWN, UNKNOWN, HANG_UP = 0, 1, 2
GRACE = 3.0  # seconds in which a rank that failed can say why, after its connection broke


class Layout(NamedTuple):
    """What one kind of message holds, in order."""

    is_forward: bool
    values: tuple[Value, ...]
    readers: tuple[tuple[int, ...], ...]  # of gradients: for each value, the layers that read it
    shapes: tuple[Shape, ...] | None  # None: they depend on data

    @property
    def forms(self) -> list[Form]:
        assert self.shapes is not None
        if self.is_forward:
            return wire.values_forms(self.shapes)
        rows = zip(self.shapes, self.readers, strict=True)
        return [_of_gradient(f) for shape, readers in rows for _ in readers for f in shape.forms]

    def tensors(self, contents: Mapping[Value, Any]) -> list[Tensor | None]:
        if self.is_forward:
            return list(wire.values_tensors(contents, self.values))
        found: list[Tensor | None] = []
        for value, readers in zip(self.values, self.readers, strict=True):
            given = dict(contents[value])
            found += [tensor for reader in readers for tensor in given[reader]]
        return found

    def contents(self, tensors: Sequence[Tensor | None]) -> dict[Value, Any]:
        assert self.shapes is not None
        if self.is_forward:
            return wire.values_again(tensors, self.values, self.shapes)
        rest = iter(tensors)
        return {
            value: [(reader, [next(rest) for _ in shape.forms]) for reader in readers]
            for value, readers, shape in zip(self.values, self.readers, self.shapes, strict=True)
        }


def _of_gradient(form: Form) -> Form:
    """What has no gradient takes no room."""
    has_gradient = form.dtype.is_floating_point or form.dtype.is_complex
    return form if has_gradient else form._replace(shape=(0,), stride=(1,))


class Line:
    """Messages from one other rank, in the order in which it sends them.

    A receive whose form is known is posted at once; a thread of the line's own waits for it.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, mailbox: Mailbox) -> None:
        self.group, self.mailbox, self.number = group, mailbox, peer
        self.peer = dist.get_global_rank(group, peer)
        self.awaited: SimpleQueue[tuple[Action, Layout, Tensor | None, Any] | None] = SimpleQueue()
        self.thread = Thread(target=self._wait, name=f"stageline-from-{peer}", daemon=True)
        self.thread.start()

    def expect(self, send: Action, layout: Layout) -> None:
        if layout.shapes is None:
            self.awaited.put((send, layout, None, None))
        else:
            buffer = torch.empty(wire.num_bytes(layout.forms), dtype=torch.uint8)
            work = dist.irecv(buffer, self.peer, self.group, KNOWN)
            self.awaited.put((send, layout, buffer, work))

    def close(self) -> None:
        self.awaited.put(None)
        self.thread.join()

    def _wait(self) -> None:
        while (item := self.awaited.get()) is not None:
            send, layout, buffer, work = item
            try:
                if buffer is None:
                    layout, buffer = self._unknown(layout)
                else:
                    work.wait()
            except RuntimeError as error:  # the connection is gone
                self.mailbox.lose(self.number, str(error))
                return
            found = layout.contents(wire.unpack(buffer, layout.forms))
            self.mailbox.put(send, Message(found, perf_counter()))

    def _unknown(self, layout: Layout) -> tuple[Layout, Tensor]:
        """First how long the header is, then the header, then the message."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, self.peer, self.group, UNKNOWN)
        header = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(header, self.peer, self.group, UNKNOWN)
        layout = layout._replace(shapes=pickle.loads(header.numpy().tobytes()))
        buffer = torch.empty(wire.num_bytes(layout.forms), dtype=torch.uint8)
        dist.recv(buffer, self.peer, self.group, UNKNOWN)
        return layout, buffer


class Outgoing:
    """Messages on their way out. They are held until they have left, by a thread of their own."""

    def __init__(self, group: dist.ProcessGroup, mailbox: Mailbox) -> None:
        self.group, self.mailbox = group, mailbox
        self.leaving: SimpleQueue[tuple[int, Any, Tensor] | None] = SimpleQueue()
        self.thread = Thread(target=self._wait, name="stageline-sends", daemon=True)
        self.thread.start()

    def send(self, peer: int, layout: Layout, contents: Mapping[Value, Any]) -> None:
        tensors = layout.tensors(contents)
        target = dist.get_global_rank(self.group, peer)
        if layout.shapes is None:
            layout = layout._replace(shapes=_actual_shapes(layout, contents))
            header = torch.frombuffer(bytearray(pickle.dumps(layout.shapes)), dtype=torch.uint8)
            self._post(target, torch.tensor([len(header)]), UNKNOWN)
            self._post(target, header, UNKNOWN)
            self._post(target, wire.pack(tensors, layout.forms), UNKNOWN)
        else:
            self._post(target, wire.pack(tensors, layout.forms), KNOWN)

    def close(self) -> None:
        self.leaving.put(None)
        self.thread.join()

    def _post(self, target: int, buffer: Tensor, tag: int) -> None:
        self.leaving.put((target, dist.isend(buffer, target, self.group, tag), buffer))

    def _wait(self) -> None:
        while (item := self.leaving.get()) is not None:
            target, work, _ = item
            try:
                work.wait()
            except RuntimeError as error:
                self.mailbox.lose(target, str(error))
                return


def _actual_shapes(layout: Layout, contents: Mapping[Value, Any]) -> tuple[Shape, ...]:
    """Of a message whose form depends on data; a gradient has that of its value."""
    if layout.is_forward:
        return tuple(Shape.of(contents[value]) for value in layout.values)
    found = []
    for value in layout.values:
        rows = [gradients for _, gradients in contents[value]]
        columns = zip(*rows, strict=True)
        there = [next((t for t in column if t is not None), None) for column in columns]
        found.append(Shape.of([torch.empty(0) if t is None else t for t in there]))
    return tuple(found)


@dataclass
class Standing:
    """Where a rank is, for others to see."""

    name: str
    where: str = "its start"

    def words(self) -> str:
        return f"{self.name} at {self.where}"


class Processes:
    """A driver for the one rank of this process. State: its lines to others, and the watch."""

    def __init__(
        self,
        place: Place,
        device: torch.device | None,
        limit: float,
        reduce: Callable[[int], None],
    ) -> None:
        self.place, self.group = place, place.pipeline
        self.device, self.limit, self.reduce = device, limit, reduce
        self.rank = dist.get_rank(self.group)
        self.mailbox = Mailbox(limit)
        self.lines: dict[int, Line] = {}  # by the rank that they come from
        self.outgoing = Outgoing(self.group, self.mailbox)
        self.shapes: dict[object, dict[Value, Shape]] = {}  # by the signature of a micro-batch
        name = (
            f"rank {self.rank}"
            if place.num_replicas == 1
            else (f"rank {self.rank} of replica {place.replica}")
        )
        self.at = Standing(name)
        number, count = dist.get_rank(place.everyone), dist.get_world_size(place.everyone)
        self.watch = Watch(store_for(place), number, count, self.at.words, self.mailbox.close)
        # also when it is garbage collected, and before the interpreter goes: no thread may be
        # inside of torch then
        self.end = weakref.finalize(self, _end, self.watch, self.outgoing, self.lines)

    def run(self, executor: Executor, step: Step) -> None:
        if not self.end.alive:
            raise ModelError(
                "the pipeline is closed, by close() or because a rank failed: build another, or "
                "start again from a checkpoint"
            )
        transport = Network(self, executor, step)
        run = executor.run(self.rank, step, transport)
        try:
            with current(self.device):
                need = next(run)
                while True:
                    self.at.where = f"{step.now[self.rank]} of step {step.number}"
                    need = run.send(self.mailbox.take(need))
        except StopIteration:
            self.at.where = f"the end of step {step.number}"
        except Stopped:
            raise self._failed(self.watch.failure or NO_ANSWER) from None
        except Lost as lost:
            raise self._failed(self._loss_of(lost)) from None
        except Empty:
            raise self._failed(self._overdue(need)) from None
        except BaseException as error:
            told = self.watch.tell(failure_text(executor, step, self.rank, error))
            raise self._failed(told) from error

    def _failed(self, text: str) -> StageError:
        """Hang up on everyone, so that no thread of theirs or ours goes on waiting."""
        for group in (self.place.pipeline, self.place.everyone, self.place.replicas):
            if group is not None:
                hang_up(group)
        self.close()
        return StageError(text)

    def _loss_of(self, lost: Lost) -> str:
        """Who failed first, if it says so in time."""
        return self.watch.wait_for_failure(GRACE) or self.watch.tell(
            f"rank {lost.rank} is gone: its connection broke while rank {self.rank} was at "
            f"{self.at.where}{self._positions()}\n  {lost}"
        )

    def _overdue(self, need: Action) -> str:
        return self.watch.tell(
            f"rank {self.rank} has waited {self.limit:g} s for {need}, longer than it should"
            f"{self._positions()}"
        )

    def _positions(self) -> str:
        """Where each rank stands; one that does not say so any more has stopped answering."""
        parts = []
        for where, ago in self.watch.positions().values():
            silence = f" (silent for {ago:.0f} s)" if ago > SILENCE else ""
            parts.append(f"{where}{silence}")
        return f"\n  {', '.join(parts)}" if parts else ""

    def layout(self, executor: Executor, send: Action, step: Step) -> Layout:
        """What a message holds."""
        is_forward = send.kind is Kind.SEND_F
        values = executor.parcels[send]
        stage = executor.stages[send.stage]
        readers = tuple(
            tuple(bound.number for bound in stage.bound if value in bound.outside)
            for value in values
        )
        known = self._shapes(executor.layers, step, send.microbatch)
        is_known = all(value in known for value in values)
        shapes = tuple(known[value] for value in values) if is_known else None
        return Layout(is_forward, values, () if is_forward else readers, shapes)

    def _shapes(self, layers: LayerSequence, step: Step, microbatch: int) -> dict[Value, Shape]:
        inputs = step.inputs[microbatch]
        training = tuple(layer.module.training for layer in layers)
        forms = tuple((name, Shape.of(value)) for name, value in sorted(inputs.items()))
        signature = (repr(forms), training, step.ambient)
        if signature not in self.shapes:
            self.shapes[signature] = value_shapes(layers, inputs, step.ambient)
        return self.shapes[signature]

    def close(self) -> None:
        self.end()


def _end(watch: Watch, outgoing: Outgoing, lines: dict[int, Line]) -> None:
    watch.close()
    outgoing.close()
    for line in lines.values():
        line.close()
    lines.clear()


class Network:
    """The transport of one step."""

    def __init__(self, home: Processes, executor: Executor, step: Step) -> None:
        self.home, self.executor, self.step = home, executor, step

    def send(self, send: Action, message: Message) -> None:
        peer = self.executor.program.placement[send.peer]
        layout = self.home.layout(self.executor, send, self.step)
        self.home.outgoing.send(peer, layout, message.contents)

    def expect(self, receive: Action) -> None:
        send = Action(receive.peer, SENDS[receive.kind], receive.microbatch, receive.stage)
        peer = self.executor.program.placement[send.stage]
        if peer not in self.home.lines:
            self.home.lines[peer] = Line(self.home.group, peer, self.home.mailbox)
        layout = self.home.layout(self.executor, send, self.step)
        self.home.lines[peer].expect(send, layout)

    def reduce(self, stage: int) -> None:
        self.home.reduce(stage)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close all lines of a group of our own.

    Nothing ends gloo's waiting for a message but a wait that is over: that closes the line.
    """
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            with suppress(RuntimeError):  # it is over, or the line was closed before
                nothing = dist.irecv(torch.empty(1), peer, group, HANG_UP)
                assert nothing is not None  # this process is of the group
                nothing.wait(timedelta(milliseconds=1))


def store_for(place: Place) -> dist.distributed_c10d.Store:
    """One for each pipeline, and for all of its replicas: what fails in one concerns them all."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  what the group itself uses
    made = store.add(f"stageline/{dist.get_rank(place.everyone)}", 1)
    return dist.distributed_c10d.PrefixStore(f"stageline/pipeline/{made}", store)
