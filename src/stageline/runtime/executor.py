"""The loop that carries out a rank's program. It knows nothing of threads, processes or devices.

A rank is a generator: it yields the send whose message it needs next, and is given the message. A
driver decides what waiting means: `serial` lets another rank go on, `threads` blocks.

A mini-batch begins a segment. In it a rank runs its period once, for this mini-batch and for those
before that are still on their way; what is left then runs in segments that no mini-batch begins.

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
from stageline.runtime.stepper import Stepper, Update
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.edges import Routes
from stageline.schedules.stream import Beat, Period

Contents = dict[Value, Any]  # values, or gradients of values
Parcel = tuple[int, Action]  # a message: of which mini-batch, and its send
Rank = Generator[Parcel, "Message", None]

FORWARDS = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
BACKWARDS = frozenset(
    {Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD, Kind.STEP}
)


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

    def send(self, parcel: Parcel, message: Message) -> None:
        """Hand a message over, and go on."""

    def expect(self, minibatch: int, receive: Action) -> None:
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
    minibatch: int = 0


class Task(NamedTuple):
    """One action of a rank's program, with all that is known of it before the data."""

    action: Action
    stage: Stage | None  # of what computes
    awaits: tuple[tuple[Action, bool], ...]  # messages, and whether they come from another rank
    gives: tuple[tuple[Action, bool, tuple[Value, ...]], ...]  # and what of its values goes there
    in_halves: bool  # the backward of this micro-batch comes as I and W
    waits: bool  # between this forward and its backward the rank does something else
    ahead: Beat | None  # the backward that is next, if one is
    lag: int  # how many mini-batches its own came before the one that begins the segment
    version: int  # of the weights, relative to the number of its mini-batch
    depth: int  # how many versions before the one that a step makes are still in use after it


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
    updates: dict[int, Update] = field(default_factory=dict)  # by stage


class Boxes(NamedTuple):
    """What a rank keeps for itself between two segments."""

    inbox: dict[Parcel, Message]  # messages between two stages of this rank
    outbox: dict[Parcel, Message]  # made, and not yet sent


@dataclass
class Stream:
    """Mini-batches on their way, one after another; often there is just one."""

    purpose: Purpose = Purpose.TRAIN
    stepper: Stepper | None = None  # None: the optimizer is not ours
    steps: dict[int, Step] = field(default_factory=dict)  # those on their way, by number
    length: int = 0  # how many there have been
    is_traced: bool = True  # whether moments are noted: an endless stream has too many
    moments: dict[int, list[Moment]] = field(default_factory=dict)  # by rank
    now: dict[int, Parcel] = field(default_factory=dict)  # what each rank does, for errors
    boxes: dict[int, Boxes] = field(default_factory=dict)  # by rank

    def add(self, step: Step) -> None:
        self.steps[self.length] = step
        self.length += 1


class Trace(NamedTuple):
    """What is left of a step for a timeline."""

    moments: dict[int, list[Moment]]
    purpose: Purpose
    num_microbatches: int
    num_minibatches: int = 1


class Executor:
    """Carries out a program on stages that stay. It has no state but theirs."""

    def __init__(
        self, period: Period, layers: LayerSequence, stages: list[Stage], recompute: Sequence[str]
    ) -> None:
        self.period, self.layers, self.stages = period, layers, stages
        self.recompute = recompute  # by stage
        self.last = len(stages) - 1
        self.inputs = [_inputs(layers, stage.numbers) for stage in stages]
        self.tasks = _tasks(period, layers, stages)
        self.parcels = {  # what each message holds
            message: values
            for row in self.tasks
            for task in row
            for message, _, values in task.gives
        }

    def depth_of(self, stage: Stage) -> int:
        """How many versions of its weights are in use beside the latest."""
        number = self.stages.index(stage)
        tasks = (task for row in self.tasks for task in row if task.action.stage == number)
        return max((task.depth for task in tasks), default=0)

    @property
    def num_ranks(self) -> int:
        return len(self.tasks)

    def run(self, rank: int, segment: int, stream: Stream, transport: Transport) -> Rank:
        """All that a rank does from the beginning of one mini-batch to that of the next."""
        kinds = KINDS[stream.purpose]
        inbox, outbox = stream.boxes.setdefault(rank, Boxes({}, {}))
        moments = stream.moments.setdefault(rank, []) if stream.is_traced else []
        for task in self.tasks[rank]:
            number = segment - task.lag
            step = stream.steps.get(number)
            action = task.action
            kind = action.kind
            if step is None or action.microbatch >= len(step.inputs) or kind not in kinds:
                continue  # a batch of fewer samples than micro-batches leaves the last ones out
            stream.now[rank] = number, action
            if kind is Kind.SEND_F or kind is Kind.SEND_B:
                transport.send((number, action), outbox.pop((number, action)))
            elif kind is Kind.RECV_F or kind is Kind.RECV_B:
                transport.expect(number, action)
            elif task.stage is None:
                start = perf_counter()
                if self._whole(task, step, stream.stepper, transport):
                    moments.append(Moment(action, start, 0.0, start, perf_counter(), number))
            else:
                if kind is not Kind.F and kind is not Kind.W:
                    self._recompute(task, step, number, moments)
                asked, sent = perf_counter(), 0.0
                received: Contents = {}
                for message, is_far in task.awaits:
                    found = (yield (number, message)) if is_far else inbox.pop((number, message))
                    sent = max(sent, found.sent_at) if is_far else sent
                    _merge(received, found.contents)
                start = perf_counter()
                made = self._compute(task, received, step, stream, segment)
                end = perf_counter()
                moments.append(Moment(action, asked, sent, start, end, number))
                for message, is_far, values in task.gives:
                    contents = {value: made[value] for value in values if value in made}
                    (outbox if is_far else inbox)[number, message] = Message(contents, end)
                del received, made  # what they hold may be large, and the next action may be far

    def _whole(self, task: Task, step: Step, stepper: Stepper | None, transport: Transport) -> bool:
        """What is done once for all micro-batches; whether it was a step of the optimizer."""
        stage = task.action.stage
        if task.action.kind is Kind.REDUCE_GRAD:
            self.stages[stage].gather_gradients()
            transport.reduce(stage)
            return False
        if stepper is None:
            return False
        step.updates[stage] = stepper.step(stage, task.depth, step)
        return True

    def _recompute(self, task: Task, step: Step, number: int, moments: list[Moment]) -> None:
        """While the gradient may still be on its way."""
        stage, microbatch = task.action.stage, task.action.microbatch
        waiting = step.waiting[stage]
        if microbatch in waiting.passes:
            start = perf_counter()
            self.stages[stage].prepare_backward(microbatch, waiting)
            moments.append(Moment(task.action, start, 0.0, start, perf_counter(), number))

    def _compute(
        self, task: Task, received: Contents, step: Step, stream: Stream, segment: int
    ) -> Contents:
        kind = task.action.kind
        if task.ahead:
            self._fetch(task.ahead, stream, segment)
        if kind is Kind.F:
            return self._forward(task, received, step, segment)
        if kind is Kind.W:
            number, microbatch = task.action.stage, task.action.microbatch
            self.stages[number].weight_gradients(microbatch, step.waiting[number])
            return {}
        return self._backward(task, received, step)

    def _fetch(self, ahead: Beat, stream: Stream, segment: int) -> None:
        """What a backward needs from host memory, while something else is computed."""
        step = stream.steps.get(segment - ahead.lag)
        number, microbatch = ahead.action.stage, ahead.action.microbatch
        if step is not None and number in step.waiting:
            self.stages[number].fetch(microbatch, step.waiting[number])

    def _forward(self, task: Task, values: Contents, step: Step, segment: int) -> Contents:
        number, microbatch = task.action.stage, task.action.microbatch
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
            version=max(0, segment - task.lag + task.version),
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
        number, microbatch = task.action.stage, task.action.microbatch
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
    period: Period, layers: LayerSequence, stages: list[Stage]
) -> tuple[tuple[Task, ...], ...]:
    """By rank."""
    in_halves = {
        (beat.action.stage, beat.action.microbatch)
        for row in period.rows
        for beat in row
        if beat.action.kind is Kind.I
    }
    reads = [_reads(layers, stage.numbers) for stage in stages]
    rows = []
    for row in period.rows:
        compute = [beat for beat in row if beat.action.kind in COMPUTE]
        following = dict(zip(compute, [*compute[1:], None], strict=True))
        rows.append(
            tuple(
                Task(
                    beat.action,
                    stages[beat.action.stage] if beat in following else None,
                    _awaits(period.routes, beat.action),
                    _gives(period.routes, beat.action, reads, stages),
                    (beat.action.stage, beat.action.microbatch) in in_halves,
                    _waits(beat, following.get(beat)),
                    _ahead(following.get(beat)),
                    beat.lag,
                    beat.version,
                    depth(row, position),
                )
                for position, beat in enumerate(row)
            )
        )
    return tuple(rows)


def depth(row: Sequence[Beat], position: int) -> int:
    """How many older versions than the one that is made here are still used after it.

    What stands further on in the row uses its weights in this segment; all others not before the
    next one.
    """
    made = row[position]
    if made.action.kind is not Kind.STEP:
        return 0
    used = (
        beat.version - beat.lag + (0 if other > position else 1)
        for other, beat in enumerate(row)
        if beat.action.kind in COMPUTE and beat.action.stage == made.action.stage
    )
    return max(0, made.version - made.lag - min(used))


def _awaits(routes: Routes, action: Action) -> tuple[tuple[Action, bool], ...]:
    stage, kind, microbatch, _, _ = action
    if kind is Kind.F:
        sends = [Action(w, Kind.SEND_F, microbatch, stage) for w in routes.writers[stage]]
    elif kind in (Kind.B, Kind.I):
        sends = [Action(r, Kind.SEND_B, microbatch, stage) for r in routes.readers[stage]]
    else:
        sends = []
    return tuple((send, routes.crosses(send.stage, stage)) for send in sends)


def _gives(
    routes: Routes, action: Action, reads: list[set[Value]], stages: list[Stage]
) -> tuple[tuple[Action, bool, tuple[Value, ...]], ...]:
    stage, kind, microbatch, _, _ = action
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


def _waits(beat: Beat, following: Beat | None) -> bool:
    """Whether what this forward keeps is not needed at once."""
    action = beat.action
    is_next = (
        following is not None
        and following.action.kind in (Kind.B, Kind.I)
        and (following.action.stage, following.action.microbatch, following.lag)
        == (action.stage, action.microbatch, beat.lag)
    )
    return action.kind is Kind.F and not is_next


def _ahead(following: Beat | None) -> Beat | None:
    is_backward = following is not None and following.action.kind in (Kind.B, Kind.I)
    return following if is_backward else None


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
