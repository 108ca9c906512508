"""The loop that carries out a rank's program. It knows nothing of threads, processes or devices.

A rank is a generator: it yields the send whose message it needs next, and is given the message. A
driver decides what waiting means: `serial` lets another rank go on, `threads` blocks.

What an action reads, awaits and sends is worked out once, before any data comes: with emulated
devices a millisecond of ours is a millisecond of theirs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.runtime.ambient import Ambient
from stageline.runtime.stage import Gradients, Pass, Stage, Target, Waiting, sums
from stageline.schedules.action import Action, Kind
from stageline.schedules.program import Program

Contents = dict[Value, Any]  # values, or gradients of values
Rank = Generator[Action, "Message", None]

FORWARDS = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD})


class Purpose(Enum):
    """What a program is run for."""

    TRAIN = "train"
    EVALUATE = "evaluate"  # no backward will come
    FILL = "fill"  # the backward comes later, when the caller's loss is known
    DRAIN = "drain"


KINDS = {
    Purpose.TRAIN: FORWARDS | BACKWARDS,
    Purpose.EVALUATE: FORWARDS,
    Purpose.FILL: FORWARDS,
    Purpose.DRAIN: BACKWARDS,
}


class Message(NamedTuple):
    """What one stage sends another."""

    contents: Contents
    sent_at: float


class Transport(Protocol):
    """How messages travel; the executor knows nothing else about where ranks live."""

    def send(self, send: Action, message: Message) -> None:
        """Hand a message over, and go on."""

    def expect(self, receive: Action) -> None:
        """A message will be needed: it may come from now on."""

    def reduce(self, stage: int) -> None:
        """All gradients of a stage are there: replicas may add theirs."""


class Moment(NamedTuple):
    """When a rank came to an action and what it waited for, in seconds of `perf_counter`."""

    action: Action
    asked: float  # its messages
    sent: float  # the last of them; 0 if there was none from another rank
    start: float
    end: float


class Task(NamedTuple):
    """One action of a rank's program, with all that is known of it before the data."""

    action: Action
    stage: Stage | None  # none in a receive, which is awaited where its message is needed
    awaits: tuple[tuple[Action, bool], ...]  # messages, and whether they come from another rank
    gives: tuple[tuple[Action, bool, tuple[Value, ...]], ...]  # and what of its values goes there
    in_halves: bool  # the backward of this micro-batch comes as I and W
    waits: bool  # between this forward and its backward the rank does something else
    ahead: tuple[Stage, int, int] | None  # whose backward is next: stage, its number, micro-batch


@dataclass
class Step:
    """One mini-batch on its way: what goes in, what waits between, what comes out."""

    inputs: list[Mapping[str, Any]]  # by micro-batch, the values that the loader brings
    seed: int
    number: int  # how many steps came before
    first: int  # of the micro-batches of all replicas, the number of the first one here
    ambient: Ambient
    purpose: Purpose = Purpose.TRAIN
    targets: list[Target] = field(default_factory=list)
    losses: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)  # of the last stage, if there is no loss
    output_gradients: list[Contents] = field(default_factory=list)  # by micro-batch, to drain with
    input_gradients: dict[tuple[int, Value], Any] = field(default_factory=dict)  # by micro-batch
    waiting: dict[int, Waiting] = field(default_factory=dict)  # by stage
    moments: dict[int, list[Moment]] = field(default_factory=dict)  # by rank
    now: dict[int, Action] = field(default_factory=dict)  # by rank, for errors


class Trace(NamedTuple):
    """What is left of a step for a timeline."""

    moments: dict[int, list[Moment]]
    purpose: Purpose
    num_microbatches: int


class Executor:
    """Carries out a program on stages that stay. It has no state but theirs."""

    def __init__(
        self, program: Program, layers: LayerSequence, stages: list[Stage], recompute: Sequence[str]
    ) -> None:
        self.program, self.layers, self.stages = program, layers, stages
        self.recompute = recompute  # by stage
        self.last = len(stages) - 1
        self.inputs = [_inputs(layers, stage.numbers) for stage in stages]
        self.tasks = _tasks(program, layers, stages)
        self.parcels = {  # what each message holds
            message: values
            for row in self.tasks
            for task in row
            for message, _, values in task.gives
        }

    def run(self, rank: int, step: Step, transport: Transport) -> Rank:
        kinds, num_microbatches = KINDS[step.purpose], len(step.inputs)
        inbox: dict[Action, Message] = {}  # messages between two stages of this rank
        outbox: dict[Action, Message] = {}  # made, and not yet sent
        moments = step.moments.setdefault(rank, [])
        for task in self.tasks[rank]:
            action = task.action
            kind, microbatch = action.kind, action.microbatch
            if microbatch >= num_microbatches or kind not in kinds:
                continue  # a batch of fewer samples than micro-batches leaves the last ones out
            step.now[rank] = action
            if kind is Kind.SEND_F or kind is Kind.SEND_B:
                transport.send(action, outbox.pop(action))
            elif kind is Kind.RECV_F or kind is Kind.RECV_B:
                transport.expect(action)
            elif kind is Kind.REDUCE_GRAD:
                transport.reduce(action.stage)
            elif task.stage is not None:
                if kind is not Kind.F and kind is not Kind.W:
                    self._recompute(task, step, moments)
                asked, sent = perf_counter(), 0.0
                received: Contents = {}
                for message, is_far in task.awaits:
                    found = (yield message) if is_far else inbox.pop(message)
                    sent = max(sent, found.sent_at) if is_far else sent
                    _merge(received, found.contents)
                start = perf_counter()
                made = self._compute(task, received, step)
                end = perf_counter()
                moments.append(Moment(action, asked, sent, start, end))
                for message, is_far, values in task.gives:
                    contents = {value: made[value] for value in values if value in made}
                    (outbox if is_far else inbox)[message] = Message(contents, end)
                del received, made  # what they hold may be large, and the next action may be far

    def _recompute(self, task: Task, step: Step, moments: list[Moment]) -> None:
        """While the gradient may still be on its way."""
        stage, microbatch = task.action.stage, task.action.microbatch
        waiting = step.waiting[stage]
        if microbatch in waiting.passes:
            start = perf_counter()
            self.stages[stage].prepare_backward(microbatch, waiting)
            moments.append(Moment(task.action, start, 0.0, start, perf_counter()))

    def _compute(self, task: Task, received: Contents, step: Step) -> Contents:
        kind = task.action.kind
        if task.ahead and step.purpose is not Purpose.EVALUATE:
            stage, number, microbatch = task.ahead
            if number in step.waiting:
                stage.fetch(microbatch, step.waiting[number])
        if kind is Kind.F:
            return self._forward(task, received, step)
        if kind is Kind.W:
            number, microbatch = task.action.stage, task.action.microbatch
            self.stages[number].weight_gradients(microbatch, step.waiting[number])
            return {}
        return self._backward(task, received, step)

    def _forward(self, task: Task, values: Contents, step: Step) -> Contents:
        number, _, microbatch, _, _ = task.action
        brought = step.inputs[microbatch]
        for value in self.inputs[number]:
            values[value] = brought[value.name]
        stage = self.stages[number]
        this = Pass(
            microbatch,
            values,
            step.targets[microbatch] if step.targets and number == self.last else None,
            step.seed,
            step.number,
            step.first,
            step.ambient,
            task.in_halves,
            self._is_recomputed(number, microbatch, step),
            offload=task.waits,
        )
        if step.purpose is Purpose.EVALUATE:
            written = stage.run_only(this)
        else:
            waiting = step.waiting.setdefault(number, Waiting())
            written, loss = stage.forward(this, waiting)
            if loss is not None:
                step.losses[microbatch] = loss
        if number == self.last and not step.targets:
            step.outputs[microbatch] = written[self.layers.output]
        return written

    def _backward(self, task: Task, gradients: Gradients, step: Step) -> Gradients:
        number, _, microbatch, _, _ = task.action
        if number == self.last and step.output_gradients:
            _merge(gradients, step.output_gradients[microbatch])
        back = self.stages[number].backward(
            microbatch, gradients, step.waiting[number], in_halves=task.in_halves
        )
        for value in self.inputs[number]:
            here = step.input_gradients.setdefault((microbatch, value), [])
            here.extend(back.pop(value))
        return back

    def _is_recomputed(self, stage: int, microbatch: int, step: Step) -> bool:
        mode = self.recompute[stage]
        is_last = microbatch == len(step.inputs) - 1
        return mode == "always" or (mode == "except_last" and not is_last)


def _tasks(
    program: Program, layers: LayerSequence, stages: list[Stage]
) -> tuple[tuple[Task, ...], ...]:
    """By rank."""
    in_halves = {
        (action.stage, action.microbatch)
        for row in program.actions
        for action in row
        if action.kind is Kind.I
    }
    reads = [_reads(layers, stage.numbers) for stage in stages]
    rows = []
    for row in program.actions:
        compute = [a for a in row if a.kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
        following = dict(zip(compute, [*compute[1:], None], strict=True))
        rows.append(
            tuple(
                Task(
                    action,
                    stages[action.stage] if action in following else None,
                    _awaits(program, action),
                    _gives(program, action, reads, stages),
                    (action.stage, action.microbatch) in in_halves,
                    _waits(action, following.get(action)),
                    _ahead(following.get(action), stages),
                )
                for action in row
            )
        )
    return tuple(rows)


def _awaits(program: Program, action: Action) -> tuple[tuple[Action, bool], ...]:
    stage, kind, microbatch, _, _ = action
    routes = program.routes
    if kind is Kind.F:
        sends = [Action(w, Kind.SEND_F, microbatch, stage) for w in routes.writers[stage]]
    elif kind in (Kind.B, Kind.I):
        sends = [Action(r, Kind.SEND_B, microbatch, stage) for r in routes.readers[stage]]
    else:
        sends = []
    return tuple((send, routes.crosses(send.stage, stage)) for send in sends)


def _gives(
    program: Program, action: Action, reads: list[set[Value]], stages: list[Stage]
) -> tuple[tuple[Action, bool, tuple[Value, ...]], ...]:
    stage, kind, microbatch, _, _ = action
    routes = program.routes
    if kind is Kind.F:
        sends = [
            (Action(stage, Kind.SEND_F, microbatch, reader), _from(stages[stage], reads[reader]))
            for reader in routes.readers[stage]
        ]
    elif kind in (Kind.B, Kind.I):
        sends = [
            (Action(stage, Kind.SEND_B, microbatch, writer), _from(stages[writer], reads[stage]))
            for writer in routes.writers[stage]
        ]
    else:
        sends = []
    return tuple((send, routes.crosses(stage, send.peer), values) for send, values in sends)


def _from(writer: Stage, reads: set[Value]) -> tuple[Value, ...]:
    return tuple(sorted(value for value in reads if value.writer in writer.numbers))


def _waits(action: Action, following: Action | None) -> bool:
    """Whether what this forward keeps is not needed at once."""
    is_next = (
        following is not None
        and following.kind in (Kind.B, Kind.I)
        and (following.stage, following.microbatch) == (action.stage, action.microbatch)
    )
    return action.kind is Kind.F and not is_next


def _ahead(following: Action | None, stages: list[Stage]) -> tuple[Stage, int, int] | None:
    if following is None or following.kind not in (Kind.B, Kind.I):
        return None
    return stages[following.stage], following.stage, following.microbatch


def _reads(layers: LayerSequence, numbers: range) -> set[Value]:
    """What a stage needs from outside."""
    read = {value for number in numbers for value in layers.sources[number]}
    return {value for value in read if value.writer not in numbers}


def _inputs(layers: LayerSequence, numbers: range) -> tuple[Value, ...]:
    """What a stage needs from the loader."""
    return tuple(sorted(v for v in _reads(layers, numbers) if v.writer == INPUT))


def _merge(into: Contents, message: Contents) -> None:
    """Values come once; gradients of one value may come from several stages."""
    for value, content in message.items():
        into[value] = into[value] + content if value in into else content


def gathered(step: Step) -> dict[tuple[int, Value], list[Any]]:
    """The gradients of what the loader brought, by micro-batch and value."""
    return {key: sums(found) for key, found in step.input_gradients.items()}
