"""What each kind of action does: the table that the loop looks up.

A handler that needs a message is a generator: it yields the message's key, and is sent the message.
"""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import NamedTuple

from stageline.runtime.accelerators.carry import brought
from stageline.runtime.engine.exchange_tied_gradients import exchange_gradients
from stageline.runtime.engine.loop import Handlers, RankRun
from stageline.runtime.engine.minibatch import (
    UNKNOWN,
    Actions,
    Contents,
    Message,
    MessageKey,
    MiniBatch,
    Purpose,
    RecordedAction,
)
from stageline.runtime.engine.tasks import Task
from stageline.runtime.exactness.in_place import NO_MARKS, Marks
from stageline.runtime.exactness.weight_aliases import UnchangedWeights
from stageline.runtime.optimizers.clipping import clip_factor, gradient_norms, scale_, total_norm
from stageline.runtime.stage.stage_values import ForwardArgs, InFlight
from stageline.schedules.action import Action, Kind


class Received(NamedTuple):
    """The messages that an action needed, and when it had to wait for them."""

    contents: Contents
    marks: Marks
    asked: float
    sent: float  # when the last message from another rank was sent; 0 if there was none


def send(run: RankRun, task: Task, minibatch: MiniBatch) -> tuple[()]:
    key = minibatch.position, task.action
    run.transport.send(key, run.boxes.outbox.pop(key))
    return ()


def expect(run: RankRun, task: Task, minibatch: MiniBatch) -> tuple[()]:
    run.transport.expect(minibatch.position, task.action)
    return ()


def forward(run: RankRun, task: Task, minibatch: MiniBatch) -> Actions:
    received = yield from _receive(run, task, minibatch)
    start = run.now()
    _fetch_ahead(run, task)
    written, marks = _run_forward(run, task, minibatch, received)
    _deliver(run, task, minibatch, (written, marks), received, start)


def backward(run: RankRun, task: Task, minibatch: MiniBatch) -> Actions:
    """Take gradients back; what has to be recomputed is, while they may still be on their way."""
    stage, microbatch = task.action.stage, task.action.microbatch
    waiting = minibatch.waiting[stage]
    if microbatch in waiting.recomputations:
        start = run.now()
        run.loop.stages[stage].prepare_backward(microbatch, waiting)
        record(run, task.action, minibatch, start)
    received = yield from _receive(run, task, minibatch)
    start = run.now()
    _fetch_ahead(run, task)
    gradients = _run_backward(run, task, minibatch, received.contents)
    _deliver(run, task, minibatch, (gradients, NO_MARKS), received, start)


def weight_gradient(run: RankRun, task: Task, minibatch: MiniBatch) -> tuple[()]:
    start = run.now()
    _fetch_ahead(run, task)
    stage, microbatch = task.action.stage, task.action.microbatch
    run.loop.stages[stage].weight_gradients(microbatch, minibatch.waiting[stage])
    record(run, task.action, minibatch, start)
    return ()


def reduce_gradients(run: RankRun, task: Task, minibatch: MiniBatch) -> tuple[()]:  # noqa: ARG001
    """Start to sum a stage's gradients over replicas, beside what follows."""
    run.loop.stages[task.action.stage].gather_gradients()
    run.loop.replicas.start(task.action.stage)
    return ()


def reduce_tied(run: RankRun, task: Task, minibatch: MiniBatch) -> Actions:  # noqa: ARG001
    """Add up the gradients of weights that several layers use, when all of them are there."""
    loop, key = run.loop, (minibatch.position, Action(run.rank, Kind.REDUCE_TIED))
    brings = loop.layout.has_accelerators and len(loop.layout.ranks_here) > 1
    own = loop.stages_of_rank[run.rank]
    layers = {number for stage in own for number in loop.layout.stages[stage]}
    run.transport.meet(run.rank, key, loop.tied.gradients(layers) if brings else {})
    message = yield key
    if brings:
        loop.tied.take_gradients(message.contents, loop.tied_on[run.rank])
    exchange_gradients(loop.tied, loop.layout, loop.replicas.collectives)
    loop.tied.add_gradients(loop.tied_on[run.rank])
    loop.replicas.start_tied()


def update_statistics(run: RankRun, task: Task, minibatch: MiniBatch) -> tuple[()]:
    """Update the running statistics of a stage with what the micro-batches of all replicas saw."""
    statistics = run.loop.stages[task.action.stage].statistics
    statistics.update(minibatch.number, run.loop.replicas.gather_statistics)
    return ()


def clip_gradients(run: RankRun, task: Task, minibatch: MiniBatch) -> Actions:  # noqa: ARG001
    """Scale a rank's gradients, when the norms of all ranks are there."""
    optimizers = run.stream.optimizers
    if optimizers is None:
        return
    stages = run.loop.stages_of_rank[run.rank]
    for stage in stages:
        run.loop.replicas.finish(stage)
    key = minibatch.position, Action(run.rank, Kind.CLIP_GRAD)
    layout = run.loop.layout
    run.transport.meet(run.rank, key, gradient_norms(layout.counted_on([run.rank])))
    message = yield key
    norms = [message.contents[number] for number in sorted(message.contents)]
    minibatch.total_norms[run.rank] = total_norm(norms)
    scale_(optimizers.parameters_of(stages), clip_factor(norms, optimizers.max_norm))


def step(run: RankRun, task: Task, minibatch: MiniBatch) -> tuple[()]:
    """Complete a stage's gradients, and step its optimizer if the pipeline owns it."""
    number, optimizers = task.action.stage, run.stream.optimizers
    stage = run.loop.stages[number]
    stage.running_layer = "optimizer" if optimizers is not None else stage.running_layer
    if stage.unchanged_weights is not None:
        stage.unchanged_weights.check()
    run.loop.replicas.finish(number)
    if optimizers is not None:
        start = run.now()
        total = minibatch.total_norms.get(run.rank)
        minibatch.updates[number] = optimizers.step(number, task.depth, stage.versions, total)
        watch_weights(run, number)
        record(run, task.action, minibatch, start)
    return ()


def watch_weights(run: RankRun, number: int) -> None:
    """Watch a stage's weights from here on, if hooks must not change them in a mini-batch."""
    stage = run.loop.stages[number]
    if stage.unchanged_weights is not None:
        stage.unchanged_weights = UnchangedWeights(run.loop.layout.stage_parameters(number))


HANDLERS: Handlers = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: backward,
    Kind.W: weight_gradient,
    Kind.SEND_F: send,
    Kind.SEND_B: send,
    Kind.RECV_F: expect,
    Kind.RECV_B: expect,
    Kind.REDUCE_GRAD: reduce_gradients,
    Kind.REDUCE_TIED: reduce_tied,
    Kind.UPDATE_STATS: update_statistics,
    Kind.CLIP_GRAD: clip_gradients,
    Kind.STEP: step,
}


def _receive(
    run: RankRun, task: Task, minibatch: MiniBatch
) -> Generator[MessageKey, Message, Received]:
    asked, sent = run.now(), 0.0
    contents: Contents = {}
    marks = NO_MARKS
    for message, is_far in task.awaits:
        key = minibatch.position, message
        found = (yield key) if is_far else run.boxes.inbox.pop(key)
        sent = max(sent, found.sent_at) if is_far else sent
        contents.update(found.contents)
        marks = {**marks, **found.marks} if found.marks else marks
    return Received(contents, marks, asked, sent)


def _deliver(
    run: RankRun,
    task: Task,
    minibatch: MiniBatch,
    made: tuple[Contents, Marks],
    received: Received,
    start: float,
) -> None:
    """Record the action, and put what it made into messages."""
    end = run.now()
    sent, sent_at = (received.sent, end) if run.now is perf_counter else (UNKNOWN, 0.0)
    if run.stream.records:
        times = received.asked, sent, start, end
        run.record(RecordedAction(task.action, *times, minibatch.position))
    values, marks = made
    boxes = run.boxes
    for message, is_far, names in task.gives:
        contents = {value: values[value] for value in names if value in values}
        own_marks = {p: mark for p, mark in marks.items() if p[0] in contents} if marks else marks
        box = boxes.outbox if is_far else boxes.inbox
        box[minibatch.position, message] = Message(contents, sent_at, own_marks)


def record(run: RankRun, action: Action, minibatch: MiniBatch, start: float) -> None:
    if run.stream.records:
        run.record(RecordedAction(action, start, 0.0, start, run.now(), minibatch.position))


def _fetch_ahead(run: RankRun, task: Task) -> None:
    """Fetch what the next backward needs from host memory, while something else is computed."""
    if task.ahead is None:
        return
    stage, microbatch = task.ahead.action.stage, task.ahead.action.microbatch
    if run.loop.stages[stage].host_memory is None:
        return
    minibatch = run.stream.minibatches.get(run.segment - task.ahead.lag)
    if minibatch is not None and stage in minibatch.waiting:
        run.loop.stages[stage].fetch(microbatch, minibatch.waiting[stage])


def _run_forward(
    run: RankRun, task: Task, minibatch: MiniBatch, received: Received
) -> tuple[Contents, Marks]:
    loop, purpose = run.loop, run.stream.purpose
    number, microbatch = task.action.stage, task.action.microbatch
    values = received.contents
    for value in loop.inputs[number]:
        values[value] = minibatch.inputs[microbatch][value.name]
    is_last = number == loop.last
    this = ForwardArgs(
        microbatch,
        values,
        minibatch.targets[microbatch] if minibatch.targets and is_last else None,
        minibatch.seed,
        minibatch.number,
        minibatch.first,
        minibatch.ambient,
        task.in_halves,
        _is_recomputed(run, number, microbatch, minibatch),
        keeps_results=loop.recompute[number] == "selective",
        offload=task.waits,
        version=max(0, run.segment - task.lag + task.version),
        marks=received.marks,
        has_own_seed=minibatch.has_own_seed,
    )
    stage = loop.stages[number]
    if purpose is Purpose.EVALUATE:
        forwarded = stage.run_only(this)
    else:
        if number not in minibatch.waiting:
            minibatch.waiting[number] = InFlight()
        forwarded = stage.forward(this, minibatch.waiting[number])
        if forwarded.loss is not None:
            minibatch.losses[microbatch] = forwarded.loss
    if is_last and not minibatch.targets:
        minibatch.outputs[microbatch] = forwarded.written[loop.layout.layers.output]
    return forwarded.written, forwarded.marks


def _run_backward(run: RankRun, task: Task, minibatch: MiniBatch, gradients: Contents) -> Contents:
    loop, number, microbatch = run.loop, task.action.stage, task.action.microbatch
    if number == loop.last and minibatch.output_gradients:
        own, given = loop.stages[number].accelerator, minibatch.output_gradients[microbatch]
        gradients.update(given if own is None else brought(given, own))
    waiting = minibatch.waiting[number]
    loop.used_weights.check(number, waiting.graphs[microbatch])
    back = loop.stages[number].backward(microbatch, gradients, waiting, in_halves=task.in_halves)
    for value in loop.first_reads[number]:
        minibatch.input_gradients[microbatch, value] = back.pop(value)
    return back


def _is_recomputed(run: RankRun, stage: int, microbatch: int, minibatch: MiniBatch) -> bool:
    mode = run.loop.recompute[stage]
    is_last = microbatch == len(minibatch.inputs) - 1
    return mode != "never" and (mode != "except_last" or not is_last)
