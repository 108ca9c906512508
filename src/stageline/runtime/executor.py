"""The loop that carries out a rank's program. It knows nothing of threads, processes or devices.

A rank is a generator: it yields the send whose message it needs next, and is given the message. A
driver decides what waiting means: `serial` lets another rank go on, `threads` blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.report.spans import Span
from stageline.runtime.ambient import Ambient
from stageline.runtime.stage import Gradients, Pass, Stage, Target, Values
from stageline.schedules.action import Action, Kind
from stageline.schedules.program import Program

Rank = Generator[Action, Any, None]
Send = Callable[[Action, Any], None]


@dataclass
class Step:
    """One mini-batch on its way: what goes in, and the losses that come out."""

    inputs: list[Mapping[str, Any]]  # by micro-batch, the values that the loader brings
    targets: list[Target]
    seed: int
    number: int  # how many steps came before
    ambient: Ambient
    forward_only: bool = False
    losses: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)  # of the last stage, if forward only
    spans: dict[int, list[Span]] = field(default_factory=dict)  # by rank, in milliseconds
    now: dict[int, Action] = field(default_factory=dict)  # by rank, for errors
    began: float = field(default_factory=perf_counter)


class Executor:
    """Carries out programs on stages that stay."""

    def __init__(
        self,
        program: Program,
        layers: LayerSequence,
        stages: list[Stage],
        recompute: Sequence[str],
    ) -> None:
        self.program, self.layers, self.stages = program, layers, stages
        self.recompute = recompute  # by stage
        self.routes = program.routes
        self.in_halves = {
            (stage, microbatch)
            for row in program.actions
            for stage, kind, microbatch, _ in row
            if kind is Kind.I
        }
        self.reads = [_reads(layers, stage.numbers) for stage in stages]

    def run(self, rank: int, step: Step, send: Send) -> Rank:
        inbox: dict[Action, Any] = {}  # messages between two stages of this rank
        outbox: dict[Action, Any] = {}  # made, and not yet sent
        for action in self.program.actions[rank]:
            if action.microbatch >= len(step.inputs):
                continue  # a batch of fewer samples than micro-batches leaves the last ones out
            if step.forward_only and action.kind not in (Kind.F, Kind.SEND_F, Kind.RECV_F):
                continue
            step.now[rank] = action
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                send(action, outbox.pop(action))
            elif action.kind is Kind.W:
                with _timed(action, step, rank):
                    self.stages[action.stage].weight_gradients(action.microbatch)
            elif action.kind in (Kind.F, Kind.I, Kind.B):
                if action.kind is not Kind.F:
                    self.stages[action.stage].prepare_backward(action.microbatch)
                received: dict[Value, Any] = {}
                for message in self._awaited(action):
                    is_far = self.routes.crosses(message.stage, message.peer)
                    found = (yield message) if is_far else inbox.pop(message)
                    _merge(received, found)
                compute = self._forward if action.kind is Kind.F else self._backward
                with _timed(action, step, rank):
                    messages = compute(action, received, step)
                for message, content in messages.items():
                    is_far = self.routes.crosses(message.stage, message.peer)
                    (outbox if is_far else inbox)[message] = content

    def _awaited(self, action: Action) -> list[Action]:
        stage, kind, microbatch, _ = action
        if kind is Kind.F:
            return [Action(w, Kind.SEND_F, microbatch, stage) for w in self.routes.writers[stage]]
        return [Action(r, Kind.SEND_B, microbatch, stage) for r in self.routes.readers[stage]]

    def _forward(
        self, action: Action, values: dict[Value, Any], step: Step
    ) -> dict[Action, dict[Value, Any]]:
        stage, _, microbatch, _ = action
        brought = step.inputs[microbatch]
        values |= {v: brought[v.name] for v in self.reads[stage] if v.writer == INPUT}
        if step.forward_only:
            written, loss = self._forward_only(stage, microbatch, values, step), None
        else:
            written, loss = self.stages[stage].forward(self._pass(stage, microbatch, values, step))
        if loss is not None:
            step.losses[microbatch] = loss
        return {
            Action(stage, Kind.SEND_F, microbatch, reader): {
                value: written[value] for value in self.reads[reader] & written.keys()
            }
            for reader in self.routes.readers[stage]
        }

    def _forward_only(self, stage: int, microbatch: int, values: Values, step: Step) -> Values:
        written = self.stages[stage].run_only(self._pass(stage, microbatch, values, step))
        if stage == len(self.stages) - 1:
            step.outputs[microbatch] = written[self.layers.output]
        return written

    def _pass(self, stage: int, microbatch: int, values: Values, step: Step) -> Pass:
        return Pass(
            microbatch,
            values,
            self._target(stage, microbatch, step),
            step.seed,
            step.number,
            step.ambient,
            in_halves=(stage, microbatch) in self.in_halves,
            recompute=self._is_recomputed(stage, microbatch, step),
        )

    def _backward(
        self, action: Action, gradients: Gradients, step: Step
    ) -> dict[Action, Gradients]:
        stage, _, microbatch, _ = action
        target = self._target(stage, microbatch, step)
        back = self.stages[stage].backward(microbatch, gradients, target)
        return {
            Action(stage, Kind.SEND_B, microbatch, writer): {
                value: found
                for value, found in back.items()
                if value.writer in self.stages[writer].numbers
            }
            for writer in self.routes.writers[stage]
        }

    def _is_recomputed(self, stage: int, microbatch: int, step: Step) -> bool:
        mode = self.recompute[stage]
        is_last = microbatch == len(step.inputs) - 1
        return mode == "always" or (mode == "except_last" and not is_last)

    def _target(self, stage: int, microbatch: int, step: Step) -> Target | None:
        is_last = stage == len(self.stages) - 1
        return step.targets[microbatch] if is_last and not step.forward_only else None


@contextmanager
def _timed(action: Action, step: Step, rank: int) -> Iterator[None]:
    start = perf_counter()
    yield
    row = step.spans.setdefault(rank, [])
    row.append(Span(action, 1e3 * (start - step.began), 1e3 * (perf_counter() - step.began)))


def _reads(layers: LayerSequence, numbers: range) -> set[Value]:
    """What a stage needs from outside."""
    read = {value for number in numbers for value in layers.sources[number]}
    return {value for value in read if value.writer not in numbers}


def _merge(into: dict[Value, Any], message: dict[Value, Any]) -> None:
    """Values come once; gradients of one value may come from several stages."""
    for value, content in message.items():
        into[value] = into[value] + content if value in into else content
