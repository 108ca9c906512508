"""The loop that carries out a rank's program. It knows nothing of threads, processes or devices.

A rank is a generator: it yields the send whose message it needs next, and is given the message. A
driver decides what waiting means: `serial` lets another rank go on, `threads` blocks.

A mini-batch begins a segment. In it a rank runs its period once, for this mini-batch and for those
before that are still on their way; what is left then runs in segments that no mini-batch begins.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from stageline.model.layers import LayerSequence, Value
from stageline.runtime.engine.tasks import Task, first_reads, inputs_of, tasks_of
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.in_place import NO_MARKS, Mark, Marks
from stageline.runtime.exactness.unregistered_weights import UsedWeights
from stageline.runtime.optimizers.late_clipping import Norms
from stageline.runtime.optimizers.speculation import Naming, ahead, as_it_is, norms_for
from stageline.runtime.optimizers.stage_optimizers import Stepper, Update
from stageline.runtime.stage.stage import Stage
from stageline.runtime.stage.stage_values import ForwardArgs, Gradients, InFlight, Target
from stageline.schedules.action import Action, Kind
from stageline.schedules.program.stream import Beat, Period

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

    contents: Any  # by value; or norms of gradients
    sent_at: float
    marks: Marks = NO_MARKS  # of the tensors of values: whose memory they are in


class Transport(Protocol):
    """How messages travel; the executor knows nothing else about where ranks live."""

    def send(self, parcel: Parcel, message: Message) -> None:
        """Hand a message over, and go on."""

    def expect(self, minibatch: int, receive: Action) -> None:
        """A message will be needed: it may come from now on."""

    def reduce(self, stage: int) -> None:
        """All gradients of a stage are there: replicas may add theirs."""

    def tell(self, rank: int, minibatch: int, norms: Norms) -> None:
        """The norms of a rank's gradients; those of all ranks are one message to each of them."""


class Moment(NamedTuple):
    """When a rank came to an action and what it waited for, in seconds of `perf_counter`."""

    action: Action
    asked: float  # its messages
    sent: float  # the last of them; 0 if there was none from another rank
    start: float
    end: float
    minibatch: int = 0


@dataclass
class Step:
    """One mini-batch on its way: what goes in, what waits between, what comes out."""

    inputs: list[Mapping[str, Any]]  # by micro-batch, the values that the loader brings
    seed: int
    number: int  # how many steps came before
    first: int  # of the micro-batches of all replicas, the number of the first one here
    ambient: ForwardContext
    purpose: Purpose = Purpose.TRAIN
    targets: list[Target] = field(default_factory=list)
    losses: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)  # of the last stage, if there is no loss
    output_gradients: list[Contents] = field(default_factory=list)  # by micro-batch, to drain with
    # by micro-batch and value, the gradients of its tensors
    input_gradients: dict[tuple[int, Value], list[Tensor | None]] = field(default_factory=dict)
    waiting: dict[int, InFlight] = field(default_factory=dict)  # by stage
    updates: dict[int, Update] = field(default_factory=dict)  # by stage


class Boxes(NamedTuple):
    """What a rank keeps for itself between two segments."""

    inbox: dict[Parcel, Message]  # messages between two stages of this rank
    outbox: dict[Parcel, Message]  # made, and not yet sent
    unsettled: list[int]  # the mini-batch whose step was a guess, if there is one
    wrong: list[int]  # the mini-batch for which others will have guessed wrong, if there is one


@dataclass
class Stream:
    """Mini-batches on their way, one after another; often there is just one."""

    purpose: Purpose = Purpose.TRAIN
    stepper: Stepper | None = None  # None: the optimizer is not ours
    steps: dict[int, Step] = field(default_factory=dict)  # those on their way, by number
    length: int = 0  # how many there have been
    is_traced: bool = True  # whether moments are noted: an endless stream has too many
    lag: int = 0  # how many segments after its own a mini-batch is done
    moments: dict[int, list[Moment]] = field(default_factory=dict)  # by rank
    now: dict[int, Parcel] = field(default_factory=dict)  # what each rank does, for errors
    boxes: dict[int, Boxes] = field(default_factory=dict)  # by rank

    @property
    def clips_late(self) -> bool:
        return self.stepper is not None and self.stepper.clipping is not None

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
        self.inputs = [inputs_of(stage) for stage in stages]
        self.first_reads = first_reads(stages)
        self.tasks = tasks_of(period, stages)
        self.ahead = ahead(self.tasks)
        depths = [self.depth_of(stage) for stage in stages]
        self.used_weights = UsedWeights(layers, stages, depths)
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
        if stream.clips_late:
            return self._run_ahead(rank, segment, stream, transport)
        return self._perform(self.tasks[rank], rank, segment, stream, transport)

    def _run_ahead(self, rank: int, segment: int, stream: Stream, transport: Transport) -> Rank:
        """As far as can be repeated with weights that are a guess, and on when they are settled."""
        boxes = stream.boxes.setdefault(rank, Boxes({}, {}, [], []))
        own = self.ahead.by_rank[rank]
        yield from self._perform(own.first, rank, segment, stream, transport)
        name: Naming = as_it_is
        if boxes.unsettled:
            number = boxes.unsettled.pop()
            message = yield number, norms_for(rank)
            self._settle(rank, number, message.contents, stream)
        if boxes.wrong and boxes.wrong.pop() < segment and segment in stream.steps:
            name = self.ahead.second
            yield from self._forget(rank, segment, stream.steps[segment], transport)
            yield from self._perform(own.first, rank, segment, stream, transport, name)
        yield from self._perform(own.rest, rank, segment, stream, transport, name)

    def _step_ahead(
        self,
        rank: int,
        number: int,
        stream: Stream,
        transport: Transport,
    ) -> Rank:
        """Of all stages of a rank, when the gradients of the last of them are there."""
        assert stream.stepper is not None
        clipping, step = stream.stepper.clipping, stream.steps[number]
        assert clipping is not None
        stages = self.ahead.by_rank[rank].stages
        stream.stepper.begin_late(stages, step)
        norms = clipping.norms(stages)
        transport.tell(rank, number, norms)
        if clipping.guess(stages, norms):
            stream.boxes[rank].unsettled.append(number)
        else:
            message = yield number, norms_for(rank)
            self._settle(rank, number, message.contents, stream)

    def _settle(self, rank: int, number: int, norms: Norms, stream: Stream) -> None:
        assert stream.stepper is not None
        assert stream.stepper.clipping is not None
        stages = self.ahead.by_rank[rank].stages
        update, is_wrong = stream.stepper.clipping.settle(stages, norms)
        stream.steps[number].updates |= dict.fromkeys(stages, update)
        if is_wrong:
            stream.boxes[rank].wrong.append(number)

    def _forget(self, rank: int, number: int, step: Step, transport: Transport) -> Rank:
        """What forwards with wrong weights left behind, here and on its way to here."""
        own = self.ahead.by_rank[rank]
        for stage in own.stages:
            step.waiting.pop(stage, None)
            self.stages[stage].statistics.forget(step.number)
        for receive, send, was_asked in own.stale:
            if send.microbatch < len(step.inputs):
                if not was_asked:
                    transport.expect(number, receive)
                yield number, send

    def _perform(
        self,
        tasks: Sequence[Task],
        rank: int,
        segment: int,
        stream: Stream,
        transport: Transport,
        name: Naming = as_it_is,
    ) -> Rank:
        """The loop. Messages that go a second time have names of their own."""
        kinds = KINDS[stream.purpose]
        inbox, outbox, _, _ = stream.boxes.setdefault(rank, Boxes({}, {}, [], []))
        moments = stream.moments.setdefault(rank, []) if stream.is_traced else []
        for task in tasks:
            number = segment - task.lag
            step = stream.steps.get(number)
            action = task.action
            kind = action.kind
            if step is None or action.microbatch >= len(step.inputs) or kind not in kinds:
                continue  # a batch of fewer samples than micro-batches leaves the last ones out
            stream.now[rank] = number, action
            if kind is Kind.SEND_F or kind is Kind.SEND_B:
                transport.send((number, name(action)), outbox.pop((number, action)))
            elif kind is Kind.RECV_F or kind is Kind.RECV_B:
                transport.expect(number, name(action))
            elif task.stage is None:
                yield from self._whole(task, rank, number, stream, transport, moments)
            else:
                if kind is not Kind.F and kind is not Kind.W:
                    self._recompute(task, step, number, moments)
                asked, sent = perf_counter(), 0.0
                received: Contents = {}
                found_marks: dict[tuple[Value, int], Mark] = {}
                for message, is_far in task.awaits:
                    parcel = number, name(message)
                    found = (yield parcel) if is_far else inbox.pop((number, message))
                    sent = max(sent, found.sent_at) if is_far else sent
                    received.update(found.contents)
                    found_marks.update(found.marks)
                start = perf_counter()
                made, marks = self._compute(task, received, found_marks, step, stream, segment)
                end = perf_counter()
                moments.append(Moment(action, asked, sent, start, end, number))
                for message, is_far, values in task.gives:
                    contents = {value: made[value] for value in values if value in made}
                    sent_marks = {at: mark for at, mark in marks.items() if at[0] in contents}
                    box = outbox if is_far else inbox
                    box[number, message] = Message(contents, end, sent_marks)
                del received, made  # what they hold may be large, and the next action may be far

    def _whole(
        self,
        task: Task,
        rank: int,
        number: int,
        stream: Stream,
        transport: Transport,
        moments: list[Moment],
    ) -> Rank:
        """What is done once for all micro-batches: reduce gradients, step the optimizer."""
        stage, stepper = task.action.stage, stream.stepper
        if task.action.kind is Kind.REDUCE_GRAD:
            self.stages[stage].gather_gradients()
            transport.reduce(stage)
        elif stepper is not None:
            start = perf_counter()
            if not stream.clips_late:
                step = stream.steps[number]
                step.updates[stage] = stepper.step(stage, task.depth, step)
            elif task.is_last_step:
                yield from self._step_ahead(rank, number, stream, transport)
            moments.append(Moment(task.action, start, 0.0, start, perf_counter(), number))

    def _recompute(self, task: Task, step: Step, number: int, moments: list[Moment]) -> None:
        """While the gradient may still be on its way."""
        stage, microbatch = task.action.stage, task.action.microbatch
        waiting = step.waiting[stage]
        if microbatch in waiting.recomputations:
            start = perf_counter()
            self.stages[stage].prepare_backward(microbatch, waiting)
            moments.append(Moment(task.action, start, 0.0, start, perf_counter(), number))

    def _compute(
        self,
        task: Task,
        received: Contents,
        marks: Marks,
        step: Step,
        stream: Stream,
        segment: int,
    ) -> tuple[Contents, Marks]:
        kind = task.action.kind
        if task.ahead:
            self._fetch(task.ahead, stream, segment)
        if kind is Kind.F:
            return self._forward(task, received, marks, step, segment)
        if kind is Kind.W:
            number, microbatch = task.action.stage, task.action.microbatch
            self.stages[number].weight_gradients(microbatch, step.waiting[number])
            return {}, NO_MARKS
        return self._backward(task, received, step), NO_MARKS

    def _fetch(self, ahead: Beat, stream: Stream, segment: int) -> None:
        """What a backward needs from host memory, while something else is computed."""
        step = stream.steps.get(segment - ahead.lag)
        number, microbatch = ahead.action.stage, ahead.action.microbatch
        if step is not None and number in step.waiting:
            self.stages[number].fetch(microbatch, step.waiting[number])

    def _forward(
        self, task: Task, values: Contents, marks: Marks, step: Step, segment: int
    ) -> tuple[Contents, Marks]:
        number, microbatch = task.action.stage, task.action.microbatch
        brought = step.inputs[microbatch]
        for value in self.inputs[number]:
            values[value] = brought[value.name]
        stage = self.stages[number]
        this = ForwardArgs(
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
            marks=marks,
        )
        if step.purpose is Purpose.EVALUATE:
            forwarded = stage.run_only(this)
        else:
            waiting = step.waiting.setdefault(number, InFlight())
            forwarded = stage.forward(this, waiting)
            if forwarded.loss is not None:
                step.losses[microbatch] = forwarded.loss
        if number == self.last and not step.targets:
            step.outputs[microbatch] = forwarded.written[self.layers.output]
        return forwarded.written, forwarded.marks

    def _backward(self, task: Task, gradients: Gradients, step: Step) -> Gradients:
        number, microbatch = task.action.stage, task.action.microbatch
        if number == self.last and step.output_gradients:
            gradients.update(step.output_gradients[microbatch])
        self.used_weights.check(number, step.waiting[number].graphs[microbatch])
        back = self.stages[number].backward(
            microbatch, gradients, step.waiting[number], in_halves=task.in_halves
        )
        for value in self.first_reads[number]:
            step.input_gradients[microbatch, value] = back.pop(value)
        return back

    def _is_recomputed(self, stage: int, microbatch: int, step: Step) -> bool:
        mode = self.recompute[stage]
        is_last = microbatch == len(step.inputs) - 1
        return mode == "always" or (mode == "except_last" and not is_last)
