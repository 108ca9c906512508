"""One rank in this process, the others elsewhere: messages travel over a process group.

    rank thread      expect ─► irecv posted        send ─► packed, isend
    a thread a peer       waits for it ─► mailbox       a thread waits for sends to leave

The rank itself waits only at its mailbox, where a failure of another rank reaches it too.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.errors import ModelError, StageError, StagelineError
from stageline.model.layers import Value
from stageline.runtime import trees
from stageline.runtime.backends.processes import packing as wire
from stageline.runtime.backends.processes.encoding import encode
from stageline.runtime.backends.processes.exchange import bytes_to_tensor, decode_tensor
from stageline.runtime.backends.processes.failure_watch import FailureWatch
from stageline.runtime.backends.processes.groups import Place
from stageline.runtime.backends.processes.message_shapes import TensorSpec, ValueSpec, predict_specs
from stageline.runtime.backends.threads import Running, failure_text, segments_to_drain
from stageline.runtime.devices import current
from stageline.runtime.engine.loop import Executor, Message, Parcel, Step, Stream
from stageline.runtime.exactness.in_place import Mark
from stageline.runtime.optimizers.late_clipping import Norms
from stageline.runtime.optimizers.speculation import sent_as
from stageline.schedules.action import NO_VERSION, Action, Kind

UNKNOWN = 0  # tag of messages whose form only the sender knows
SMALL = 2**20  # bytes of messages that may be held a little longer than they need


@dataclass(frozen=True)
class Layout:
    """What one kind of message holds, in order."""

    is_forward: bool
    values: tuple[Value, ...]
    shapes: tuple[ValueSpec, ...] | None  # None: they depend on data

    @cached_property
    def packing(self) -> wire.Packing:
        assert self.shapes is not None
        forms = wire.specs_of_values(self.shapes)
        return wire.Packing.of(forms if self.is_forward else list(map(_of_gradient, forms)))

    @cached_property
    def is_lone(self) -> bool:
        """One tensor that is not in a tree: that is most messages."""
        if self.shapes is None or len(self.shapes) != 1:
            return False
        return self.shapes[0].tree.type is None and len(self.shapes[0].tensor_specs) == 1

    def tensors(self, contents: Mapping[Value, Any]) -> list[Tensor | None]:
        if self.is_lone:
            content = contents[self.values[0]]
            if not self.is_forward:
                gradients: list[Tensor | None] = content
                return gradients
            if isinstance(content, Tensor):
                return [content]
        if self.is_forward:
            return list(wire.tensors_of_values(contents, self.values, self.shapes))
        return [tensor for value in self.values for tensor in contents[value]]

    def places(self, contents: Mapping[Value, Any]) -> list[tuple[Value, int]]:
        """Return for each tensor of a message of values its value, and its position there."""
        return [
            (value, position)
            for value in self.values
            for position in range(len(trees.tensors(contents[value])))
        ]

    def contents(self, tensors: Sequence[Tensor | None]) -> dict[Value, Any]:
        assert self.shapes is not None
        if self.is_lone:
            return {self.values[0]: tensors[0] if self.is_forward else list(tensors)}
        if self.is_forward:
            return wire.rebuild_values(tensors, self.values, self.shapes)
        rest = iter(tensors)
        return {
            value: [next(rest) for _ in shape.tensor_specs]
            for value, shape in zip(self.values, self.shapes, strict=True)
        }


Way = tuple[int, Layout]  # to or from which rank a message goes, and what it holds


def _of_gradient(form: TensorSpec) -> TensorSpec:
    """What has no gradient takes no room."""
    has_gradient = form.dtype.is_floating_point or form.dtype.is_complex
    return form if has_gradient else form._replace(shape=(0,), stride=(1,))


class Lost(Exception):  # noqa: N818  what it means is for others to say
    """Raised in a rank that did not get what it needs from another."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class Receive(NamedTuple):
    """A message that was promised. If its form is known, a receive is posted for it."""

    peer: int
    layout: Layout
    buffer: Tensor | None
    work: Any


class Incoming:
    """Messages to this rank. State: those that were promised, and those that came out of turn."""

    def __init__(self, place: Place, limit: float) -> None:
        self.place, self.limit = place, timedelta(seconds=limit)
        self.promised: dict[Parcel, Receive] = {}
        self.unknown: dict[int, deque[Parcel]] = {}  # by rank, in the order in which they come
        self.early: dict[Parcel, Message] = {}

    def expect(self, send: Parcel, peer: int, layout: Layout) -> None:
        buffer = work = None
        if layout.shapes is None:
            self.unknown.setdefault(peer, deque()).append(send)
        else:
            buffer = layout.packing.empty()
            work = self._posted(buffer, peer, layout.packing.tag)
        self.promised[send] = Receive(peer, layout, buffer, work)

    def take(self, send: Parcel) -> Message:
        """Wait for a message; raises `Lost` if it does not come."""
        while send not in self.early:
            receive = self.promised[send]
            if receive.buffer is None:
                self._take_unknown(receive.peer)
            else:
                del self.promised[send]
                self._wait(receive.work, receive.peer)
                return _message(receive.layout, receive.buffer)
        return self.early.pop(send)

    def _take_unknown(self, peer: int) -> None:
        """The next one: how long its header is, then the header, then the message."""
        send = self.unknown[peer].popleft()
        layout = self.promised.pop(send).layout
        length = torch.empty(1, dtype=torch.int64)
        self._receive(length, peer)
        header = torch.empty(int(length), dtype=torch.uint8)
        self._receive(header, peer)
        shapes = tuple(map(ValueSpec.from_description, decode_tensor(header)))
        layout = replace(layout, shapes=shapes)
        buffer = layout.packing.empty()
        self._receive(buffer, peer)
        self.early[send] = _message(layout, buffer)

    def _receive(self, buffer: Tensor, peer: int) -> None:
        self._wait(self._posted(buffer, peer, UNKNOWN), peer)

    def _posted(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return self.place.pipeline.recv([buffer], peer, tag)
        except RuntimeError as error:
            raise Lost(peer, str(error)) from None

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(self.limit)
        except RuntimeError as error:  # the connection broke, or the time is over
            raise Lost(peer, str(error)) from None


def _message(layout: Layout, buffer: Tensor) -> Message:
    tensors, sent_at, aliased = layout.packing.unpack(buffer)
    contents = layout.contents(tensors)
    if not aliased:
        return Message(contents, sent_at)
    places = layout.places(contents)
    return Message(contents, sent_at, {places[position]: Mark.ALIASED for position in aliased})


class Outgoing:
    """Messages on their way out. State: those that have not left yet.

    A thread of their own holds them until they have. It is woken for many small ones at once, and
    when the rank is about to wait: a thread that wakes takes time from the rank.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.fresh: list[tuple[Any, Tensor]] = []  # the thread has not been told of them
        self.num_bytes = 0  # of these
        self.leaving: SimpleQueue[list[tuple[Any, Tensor]] | None] = SimpleQueue()
        self.thread = Thread(target=self._wait, name="stageline-sends", daemon=True)
        self.thread.start()

    def send(self, peer: int, layout: Layout, message: Message) -> None:
        contents: Mapping[Value, Any] = message.contents
        tensors = layout.tensors(contents)
        aliased: list[int] = []
        if message.marks:
            places = layout.places(contents)
            marks = (message.marks.get(place, Mark.NONE) for place in places)
            aliased = [i for i, mark in enumerate(marks) if mark & Mark.ALIASED]
        if layout.shapes is None:
            layout = replace(layout, shapes=_actual_shapes(layout, contents))
            described = tuple(shape.description for shape in layout.shapes or ())
            header = bytes_to_tensor(encode(described))
            self._post(peer, torch.tensor([len(header)]), UNKNOWN)
            self._post(peer, header, UNKNOWN)
            self._post(peer, layout.packing.pack(tensors, aliased), UNKNOWN)
        else:
            self._post(peer, layout.packing.pack(tensors, aliased), layout.packing.tag)

    def flush(self, beyond: int = 0) -> None:
        """If they take more than so many bytes."""
        if self.num_bytes > beyond:
            self.leaving.put(self.fresh)
            self.fresh, self.num_bytes = [], 0

    def close(self) -> None:
        self.flush()
        self.leaving.put(None)
        self.thread.join()

    def _post(self, peer: int, buffer: Tensor, tag: int) -> None:
        try:
            self.fresh.append((self.place.pipeline.send([buffer], peer, tag), buffer))
        except RuntimeError as error:
            raise Lost(peer, str(error)) from None
        self.num_bytes += buffer.nbytes

    def _wait(self) -> None:
        while (items := self.leaving.get()) is not None:
            while items:
                with suppress(RuntimeError):  # the rank learns of it when it sends or receives
                    items[0][0].wait()
                del items[0]


def _actual_shapes(layout: Layout, contents: Mapping[Value, Any]) -> tuple[ValueSpec, ...]:
    """Of a message whose form depends on data; a gradient has that of its value."""
    if layout.is_forward:
        return tuple(ValueSpec.of(contents[value]) for value in layout.values)
    return tuple(
        ValueSpec.of([torch.empty(0) if t is None else t for t in contents[value]])
        for value in layout.values
    )


class Processes:
    """A driver for the one rank of this process. State: its lines to others, and the watch."""

    def __init__(
        self,
        place: Place,
        device: torch.device | None,
        limit: float,
        reduce: Callable[[int], None],
        num_parameters: int,
    ) -> None:
        self.place, self.num_parameters = place, num_parameters
        self.device, self.limit, self.reduce = device, limit, reduce
        self.rank = dist.get_rank(place.pipeline)
        self.incoming, self.outgoing = Incoming(place, limit), Outgoing(place)
        self.shapes: dict[object, dict[Value, ValueSpec]] = {}  # by all that they depend on
        self.known: dict[object, dict[Action, Way]] = {}  # of the last batch
        self.watch = place.watch
        self.at = self.watch.position
        # also when it is garbage collected, and before the interpreter goes: no thread may be
        # inside of torch then
        self.end = weakref.finalize(self, _end, self.watch, self.outgoing)

    def start(self, executor: Executor, stream: Stream) -> Running:
        self.check()
        self.watch.user_error = ""
        return OneRank(self, executor, stream)

    def check(self) -> None:
        """Raise if nothing can be done any more."""
        if self.watch.failure is not None:
            raise self._failed(self.watch.failure)
        if not self.end.alive:
            raise ModelError("the pipeline is closed: build another, and load a checkpoint into it")

    def run(self, executor: Executor, segment: int, stream: Stream, transport: Network) -> None:
        """A segment of the one rank that is here."""
        run = executor.run(self.rank, segment, stream, transport)
        need: Parcel | None = None
        asked = perf_counter()
        try:
            with current(self.device):
                need = next(run)
                while True:
                    number, self.at.action = stream.now[self.rank]
                    self.at.step = stream.steps[number].number
                    transport.post()
                    self.outgoing.flush(beyond=SMALL)
                    asked = perf_counter()
                    need = run.send(transport.take(need))
        except StopIteration:
            self.outgoing.flush()
            self.at.action = None
        except Lost as lost:
            is_overdue = perf_counter() - asked >= self.limit
            told = self._overdue(need[1]) if need and is_overdue else self._loss_of(lost)
            raise self._failed(told) from None
        except StageError:
            raise
        except BaseException as error:
            told = self.watch.report_failure(failure_text(executor, stream, self.rank, error))
            raise self._failed(told) from error

    @contextmanager
    def guarded(self, what: str, task: str | None = None) -> Iterator[None]:
        """Around what all ranks do together, such as norms: if one does not take part, all raise.

        It is told which one that is. `task` names what may keep a rank busy for long.
        """
        self.check()
        try:
            with self.watch.waiting(what, task):
                yield
        except StagelineError:
            raise
        except RuntimeError as error:  # a connection broke, or the watch has ended the wait
            raise self._failed(
                self.watch.cause_of(
                    f"its connection broke while {self.watch.name} waited for all ranks to share "
                    f"{what} ({_in_short(error)})"
                )
            ) from None
        except BaseException as error:
            # others are in the middle of it too, so nothing that follows would fit together
            self._failed(
                self.watch.report_failure(
                    f"{self.watch.name} was interrupted while all ranks shared {what}\n"
                    f"  {type(error).__name__}: {error}"
                )
            )
            raise

    def _failed(self, text: str) -> StageError:
        """Hang up on everyone, so that no thread of theirs or ours goes on waiting."""
        self.place.hang_up()
        self.close()
        return StageError(text)

    def _loss_of(self, lost: Lost) -> str:
        """Who failed first, if it says so in time."""
        return self.watch.cause_of(
            f"its connection broke while {self.watch.name} was at {self.at.where} "
            f"({_in_short(lost)})",
            dist.get_group_rank(
                self.place.everyone, dist.get_global_rank(self.place.pipeline, lost.rank)
            ),
        )

    def _overdue(self, need: Action) -> str:
        return self.watch.report_failure(
            f"{self.watch.name} has waited {self.limit:g} s for {need}, longer than it should"
            f"{self.watch.describe_silent_ranks()}{self.watch.describe_positions()}"
        )

    def ways(self, executor: Executor, step: Step) -> dict[Action, Way]:
        """By send, of this rank or to it. Batches of the same shapes go the same ways, for as long
        as layers stay where they are.
        """
        training = tuple(layer.module.training for layer in executor.layers)
        forms = tuple(_forms(inputs) for inputs in step.inputs)
        batch = executor, forms, training, step.ambient
        if batch not in self.known:
            # of two kinds of batches only: the last one of an epoch may be shorter than the others
            self.known = dict([*self.known.items()][-1:])
            self.known[batch] = self._ways(executor, step, training, forms)
        return self.known[batch]

    def _ways(
        self, executor: Executor, step: Step, training: object, forms: Sequence[object]
    ) -> dict[Action, Way]:
        for form, inputs in zip(forms, step.inputs, strict=True):
            if (form, training, step.ambient) not in self.shapes:
                found = predict_specs(executor.layers, inputs, step.ambient)
                self.shapes[form, training, step.ambient] = found.specs
                self.at.unpredictable_from = found.unpredictable_from
        layouts: dict[object, Layout] = {}
        ways = {}
        home = executor.period.routes.home
        for send in executor.parcels:
            here, there = home(send.stage, send.microbatch), home(send.peer, send.microbatch)
            if self.rank in (here, there) and send.microbatch < len(forms):
                form = forms[send.microbatch]
                key = send._replace(microbatch=0), form
                if key not in layouts:
                    known = self.shapes[form, training, step.ambient]
                    layouts[key] = _layout(executor, send, known)
                ways[send] = (there if here == self.rank else here), layouts[key]
        return ways

    def close(self) -> None:
        self.end()


def _layout(executor: Executor, send: Action, known: Mapping[Value, ValueSpec]) -> Layout:
    is_forward = send.kind is Kind.SEND_F
    values = executor.parcels[send]
    is_known = all(value in known for value in values)
    shapes = tuple(known[value] for value in values) if is_known else None
    return Layout(is_forward, values, shapes)


def _forms(inputs: Mapping[str, Any]) -> tuple[object, ...]:
    """All that the shapes of values depend on; cheaply for lone tensors."""
    return tuple(
        (name, value.shape, value.dtype, value.stride(), value.requires_grad)
        if isinstance(value, Tensor)
        else (name, repr(ValueSpec.of(value)), tuple(t.requires_grad for t in trees.tensors(value)))
        for name, value in sorted(inputs.items())
    )


def _end(watch: FailureWatch, outgoing: Outgoing) -> None:
    watch.leave()
    outgoing.close()


def _in_short(error: BaseException) -> str:
    """Return the first sentence: before it gloo has a place in C++, and behind it advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]


class Network:
    """The transport of one stream. State: ways by mini-batch, and receives still to be posted."""

    def __init__(self, home: Processes) -> None:
        self.home = home
        self.ways: dict[int, dict[Action, Way]] = {}
        self.asked: list[Parcel] = []
        self.polls: dict[int, tuple[dist.Work, Tensor, torch.dtype]] = {}  # norms on their way

    def send(self, parcel: Parcel, message: Message) -> None:
        peer, layout = self._way(parcel)
        self.home.outgoing.send(peer, layout, message)
        self.post()

    def expect(self, minibatch: int, receive: Action) -> None:
        self.asked.append((minibatch, sent_as(receive)._replace(version=receive.version)))

    def take(self, parcel: Parcel) -> Message:
        if parcel[1].kind is Kind.STEP:
            return self._norms(parcel[0])
        return self.home.incoming.take(parcel)

    def post(self) -> None:
        """Sends go first, although receives stand before them: someone waits for what is sent."""
        for parcel in self.asked:
            self.home.incoming.expect(parcel, *self._way(parcel))
        self.asked.clear()

    def tell(self, rank: int, minibatch: int, norms: Norms) -> None:  # noqa: ARG002  it is known
        """Every number is that of one rank, plus zeros, which change no bit."""
        table = torch.zeros(2, self.home.num_parameters, dtype=torch.float64)
        for number, norm in norms.items():
            table[0, number], table[1, number] = norm, 1.0
        kind = next((norm.dtype for norm in norms.values()), torch.get_default_dtype())
        work = dist.all_reduce(table, group=self.home.place.pipeline, async_op=True)
        assert work is not None  # this process is of the group
        self.polls[minibatch] = work, table, kind

    def _norms(self, minibatch: int) -> Message:
        work, table, kind = self.polls.pop(minibatch)
        with self.home.guarded("norms"):
            work.wait()
        rows = enumerate(table.t())
        found = {number: norm.to(kind) for number, (norm, is_there) in rows if is_there}
        return Message(found, 0.0)

    def _way(self, parcel: Parcel) -> Way:
        number, send = parcel
        return self.ways[number][send._replace(version=NO_VERSION)]

    def reduce(self, stage: int) -> None:
        self.home.reduce(stage)


class OneRank:
    """A stream on its way through the rank of this process, in the caller's thread."""

    def __init__(self, home: Processes, executor: Executor, stream: Stream) -> None:
        self.home, self.executor, self.stream = home, executor, stream
        self.network = Network(home)

    def feed(self, step: Step) -> None:
        number = self.stream.length
        self.stream.add(step)
        self.home.at.step = step.number
        self.network.ways[number] = self.home.ways(self.executor, step)
        self.network.ways.pop(number - self.stream.lag - 1, None)
        self.home.run(self.executor, number, self.stream, self.network)

    def wait(self, number: int) -> None:
        """It is done."""

    def drain(self) -> None:
        for segment in segments_to_drain(self.stream):
            self.home.run(self.executor, segment, self.stream, self.network)
