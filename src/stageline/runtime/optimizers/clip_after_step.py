"""Clipping that costs no barrier: step first, look at the norm of all gradients after.

Each rank sends the others the norms of its gradients, and steps as if nothing had to be clipped. It
looks at their norms before the first backward of the next mini-batch. In the rare case that the
total was too large it takes its step back, clips, steps again, and runs the forwards again that it
has begun since (Zero Bubble calls this post-validation, arXiv 2401.10241):

    rank 0 │ … W6 W7 step F8 F9 F10 ─ look ─ B8 …                  nothing to clip
    rank 0 │ … W6 W7 step F8 F9 F10 ─ look ─ undo, clip, step F8 F9 F10 B8 …

A rank whose own gradients are too large already does not guess, but waits. So the gradients of a
step that is taken back are moderate, and what arithmetic brings back is good to the last digits.
Such a rank repeats its forwards as well: what they read came from ranks that did guess.

This wraps the loop from outside: the loop itself knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from stageline.runtime.backends.backend import Transport
from stageline.runtime.engine.handlers import record, watch_weights
from stageline.runtime.engine.loop import Loop, RankRun, run_tasks
from stageline.runtime.engine.minibatch import Actions, Message, MessageKey, MiniBatch
from stageline.runtime.engine.tasks import Task
from stageline.runtime.optimizers.clipping import (
    Norms,
    clip_factor,
    gradient_norms,
    total_norm,
)
from stageline.runtime.optimizers.speculation import Speculation, speculation
from stageline.runtime.optimizers.stage_optimizers import (
    StageOptimizer,
    StageOptimizers,
    Update,
)
from stageline.runtime.optimizers.undo import UndoRecord, prepare_undo, undo
from stageline.schedules.action import Action, Kind


class LateClipping:
    """State: what is needed to take back steps, and the mini-batches in doubt, by rank."""

    def __init__(self, optimizers: StageOptimizers, loop: Loop) -> None:
        self.optimizers = optimizers
        self.own = {stage: own for stage, own in optimizers.own.items() if own is not None}
        self.speculation: Speculation = speculation(loop.tasks)
        self.guessed: dict[int, UndoRecord] = {}  # by stage
        self.unsettled: dict[int, int] = {}  # by rank: the mini-batch whose step was a guess
        self.wrong: dict[int, int] = {}  # by rank: the mini-batch for which others guessed wrong

    def run_rank(self, run: RankRun) -> Actions:
        """Run as far as can be repeated with guessed weights, and on when they are settled."""
        run = run.with_handlers({Kind.STEP: self.step})
        own = self.speculation.by_rank[run.rank]
        yield from run_tasks(run, own.first)
        if run.rank in self.unsettled:
            position = self.unsettled.pop(run.rank)
            message = yield position, _meeting(run.rank)
            self._settle(run, position, message.contents)
        is_wrong = run.rank in self.wrong and self.wrong.pop(run.rank) < run.segment
        if not is_wrong or run.segment not in run.stream.minibatches:
            yield from run_tasks(run, own.rest)
            return
        yield from self._forget(run)
        second = run.with_transport(SecondAttempt(run.transport, self.speculation.second))
        yield from _renamed(run_tasks(second, own.first), self.speculation.second)
        yield from _renamed(run_tasks(second, own.rest), self.speculation.second)

    def step(self, run: RankRun, task: Task, minibatch: MiniBatch) -> Actions:
        """Step all stages of a rank, when the gradients of the last of them are complete."""
        start = run.now()
        if task.is_last_step:
            stages = self.speculation.by_rank[run.rank].stages
            for stage in stages:
                run.loop.stages[stage].running_layer = "optimizer"
                run.loop.replicas.finish(stage)
                self.optimizers.prepare(stage)
            norms = self._norms(run, stages)
            key = minibatch.position, _meeting(run.rank)
            run.transport.meet(run.rank, key, norms)
            if self._guess(stages, norms):
                self.unsettled[run.rank] = minibatch.position
            else:
                message = yield key
                self._settle(run, minibatch.position, message.contents)
            for stage in stages:
                watch_weights(run, stage)
        record(run, task.action, minibatch, start)

    def _norms(self, run: RankRun, stages: Sequence[int]) -> Norms:
        numbers = run.loop.layout.parameter_numbers
        own = self.optimizers.parameters_of(stages)
        return gradient_norms({numbers[parameter]: parameter for parameter in own})

    def _guess(self, stages: Sequence[int], own: Norms) -> bool:
        """Step, unless these stages' own gradients show already that they are to be clipped."""
        if clip_factor(list(own.values()), self.optimizers.max_norm) != 1.0:
            return False
        for stage in stages:
            if stage in self.own:
                self.guessed[stage] = prepare_undo(self.own[stage].optimizer)
                self._step(self.own[stage])
        return True

    def _settle(self, run: RankRun, position: int, everyone: Mapping[int, Tensor]) -> None:
        """Correct a step, if the norms of all ranks say so."""
        stages = self.speculation.by_rank[run.rank].stages
        norms = [everyone[number] for number in sorted(everyone)]
        total, factor = total_norm(norms), clip_factor(norms, self.optimizers.max_norm)
        is_clipped = bool(factor != 1.0)
        was_guessed = any(stage in self.guessed for stage in stages)
        for stage in stages:
            if stage in self.own:
                if is_clipped or not was_guessed:
                    self._correct(stage, factor)
                self.guessed.pop(stage, None)
                self.own[stage].after_step()
        update = Update(not math.isfinite(total), float(total), was_guessed and is_clipped)
        run.stream.minibatches[position].updates |= dict.fromkeys(stages, update)
        if is_clipped:
            self.wrong[run.rank] = position
        for stage in stages:
            watch_weights(run, stage)

    def _correct(self, stage: int, factor: Tensor) -> None:
        """Take a guess back, and step with clipped gradients, or not at all if not finite."""
        own = self.own[stage]
        if stage in self.guessed:
            undo(own.optimizer, self.guessed[stage])
        if math.isfinite(factor):
            for parameter in own.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            self._step(own)

    def _step(self, own: StageOptimizer) -> None:
        with self.optimizers.stepping(own.optimizer):
            own.optimizer.step()

    def _forget(self, run: RankRun) -> Actions:
        """Drop what forwards with wrong weights left behind, here and on its way to here."""
        minibatch = run.stream.minibatches[run.segment]
        own = self.speculation.by_rank[run.rank]
        for stage in own.stages:
            minibatch.waiting.pop(stage, None)
            run.loop.stages[stage].statistics.forget(minibatch.number)
        for receive, send, was_asked in own.stale:
            if send.microbatch < len(minibatch.inputs):
                if not was_asked:
                    run.transport.expect(minibatch.position, receive)
                yield minibatch.position, send


class SecondAttempt:
    """A transport for messages that are sent a second time, under names of their own."""

    def __init__(self, transport: Transport, name: Callable[[Action], Action]) -> None:
        self.transport, self.name = transport, name

    def send(self, key: MessageKey, message: Message) -> None:
        self.transport.send((key[0], self.name(key[1])), message)

    def expect(self, minibatch: int, receive: Action) -> None:
        self.transport.expect(minibatch, self.name(receive))

    def meet(self, rank: int, key: MessageKey, numbers: Mapping[int, Tensor]) -> None:
        self.transport.meet(rank, key, numbers)


def _renamed(actions: Actions, name: Callable[[Action], Action]) -> Actions:
    """Ask for messages under the names of their second attempt."""
    try:
        need = next(actions)
        while True:
            need = actions.send((yield (need[0], name(need[1]))))
    except StopIteration:
        return


def _meeting(rank: int) -> Action:
    """Return the name of the message with the norms of all ranks."""
    return Action(rank, Kind.CLIP_GRAD)
