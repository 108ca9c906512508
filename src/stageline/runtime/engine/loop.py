"""The loop that carries out a rank's program. It knows nothing of threads, processes or devices.

A rank is a generator: it yields the key of the message that it needs next, and is sent the message.
A backend decides what waiting means: `serial` lets another rank go on, `threads` blocks.

A mini-batch begins a segment. In it a rank runs its period once, for this mini-batch and for those
before that are still on their way; what is left then runs in segments that no mini-batch begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from stageline.runtime.backends.backend import Transport
from stageline.runtime.engine.minibatch import (
    KINDS,
    Actions,
    Boxes,
    MiniBatch,
    RecordedAction,
    Stream,
    Timer,
)
from stageline.runtime.engine.replicas import Replicas
from stageline.runtime.engine.tasks import Task, first_reads, inputs_of, tasks_of
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.exactness.unregistered_weights import UsedWeights
from stageline.runtime.placement.layout import Layout
from stageline.runtime.stage.stage import Stage
from stageline.schedules.action import Action, Kind
from stageline.schedules.program.stream import Period

Handler = Callable[["RankRun", Task, MiniBatch], Actions | tuple[()]]
Handlers = Mapping[Kind, Handler]


class Loop:
    """A program, and the stages that it runs on. It has no state but theirs."""

    def __init__(
        self,
        period: Period,
        layout: Layout,
        stages: Sequence[Stage],
        recompute: Sequence[str],
        tied: TiedWeights,
        replicas: Replicas,
        handlers: Handlers,
    ) -> None:
        self.period, self.layout, self.stages = period, layout, stages
        self.recompute = recompute  # by stage
        self.tied, self.replicas, self.handlers = tied, replicas, handlers
        self.last = len(stages) - 1
        self.inputs = [inputs_of(stage) for stage in stages]
        self.first_reads = first_reads(stages)
        self.tasks = tasks_of(period, stages)
        self.tied_on = [*map(layout.tied_on, range(len(self.tasks)))]
        self.stages_of_rank = [sorted({t.action.stage for t in row}) for row in self.tasks]
        self.used_weights = UsedWeights(layout.layers, stages, [*map(self.depth_of, stages)])
        self.values_of_message = {
            message: values
            for row in self.tasks
            for task in row
            for message, _, values in task.gives
        }

    @property
    def senders(self) -> dict[Action, list[Action]]:
        """Return the actions that make the messages from other ranks that an action awaits."""
        tasks = [task for row in self.tasks for task in row]
        made_by = {message: task.action for task in tasks for message, _, _ in task.gives}
        return {t.action: [made_by[m] for m, is_far in t.awaits if is_far] for t in tasks}

    def depth_of(self, stage: Stage) -> int:
        """Return how many versions of a stage's weights are in use beside the latest."""
        number = self.stages.index(stage)
        tasks = (task for row in self.tasks for task in row if task.action.stage == number)
        return max((task.depth for task in tasks), default=0)

    @property
    def num_ranks(self) -> int:
        return len(self.tasks)

    def run(self, rank: int, segment: int, stream: Stream, transport: Transport) -> Actions:
        """Run all that a rank does from the beginning of one mini-batch to that of the next."""
        boxes = stream.boxes.setdefault(rank, Boxes({}, {}))
        now = stream.timers.get(rank, perf_counter)
        run = RankRun(self, rank, segment, stream, transport, self.handlers, boxes, now)
        return (stream.run_rank or run_tasks)(run)


@dataclass(frozen=True)
class RankRun:
    """One segment of one rank: what handlers work with."""

    loop: Loop
    rank: int
    segment: int
    stream: Stream
    transport: Transport
    handlers: Handlers
    boxes: Boxes  # the rank's own messages
    now: Timer

    def with_handlers(self, handlers: Handlers) -> RankRun:
        return replace(self, handlers={**self.handlers, **handlers})

    def with_transport(self, transport: Transport) -> RankRun:
        return replace(self, transport=transport)

    def record(self, time: RecordedAction) -> None:
        self.stream.times.setdefault(self.rank, []).append(time)


def run_tasks(run: RankRun, tasks: Iterable[Task] | None = None) -> Actions:
    """Carry out a rank's tasks, one after another."""
    stream, kinds = run.stream, KINDS[run.stream.purpose]
    for task in run.loop.tasks[run.rank] if tasks is None else tasks:
        action = task.action
        minibatch = stream.minibatches.get(run.segment - task.lag)
        if minibatch is None or action.kind not in kinds:
            continue
        if action.microbatch >= len(minibatch.inputs):
            continue  # a batch of fewer samples than micro-batches leaves the last ones out
        stream.now[run.rank] = minibatch.position, action
        yield from run.handlers[action.kind](run, task, minibatch)
