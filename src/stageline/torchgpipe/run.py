"""Run a pipeline as torchgpipe would: a layer's own exceptions, and torch's own generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from threading import Lock
from typing import Any

import torch

from stageline.errors import StageError
from stageline.pipeline import Pipeline, session_of
from stageline.runtime.batches.call import call_on_parts
from stageline.runtime.engine.assembly import assemble
from stageline.runtime.engine.minibatch import MiniBatch, Purpose
from stageline.runtime.engine.session import Session
from stageline.schedules.action import Kind
from stageline.torchgpipe.layers import follow_modes


class Runner:
    """Runs one pipeline. State: the lock that lets several threads call it, one after another."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.lock = pipe, Lock()
        _reverse_backwards(session_of(pipe))

    def run(self, parts: Sequence[Any]) -> list[Any]:
        """Return the output of each micro-batch.

        Random numbers follow from the state of torch's generator, so that `torch.manual_seed`
        decides them. The generator moves on if a layer drew, and only then.
        """
        session = session_of(self.pipe)
        follow_modes(session.assembly.layout.layers)
        for stage in session.assembly.stages:
            stage.draws.counts = True
        before = self._num_draws()
        outputs = call_on_parts(session, parts, _seed(), self._run_stages)
        if self._num_draws() != before:
            torch.rand(())
        return outputs

    def _run_stages(self, minibatch: MiniBatch, purpose: Purpose) -> None:
        failure = None
        try:
            # ranks of two callers would wait for each other in the threads of one pipeline
            with self.lock:
                session_of(self.pipe).run(minibatch, purpose)
        except StageError as error:
            failure = error
        if failure is not None:  # outside of the handler, so that no cycle of errors arises
            raise _own_error(failure)

    def _num_draws(self) -> int:
        """Return how many forwards of layers have drawn random numbers so far."""
        stages = session_of(self.pipe).assembly.stages
        return sum(stage.draws.num_draws for stage in stages)


def _reverse_backwards(session: Session) -> None:
    """Let backwards run from the last micro-batch to the first.

    torchgpipe adds gradients in this order; all schedules of Stageline itself, in the other one.
    """
    assembly = session.assembly
    rows = [
        (
            *(action for action in row if action.kind is Kind.F),
            *reversed([action for action in row if action.kind is not Kind.F]),
        )
        for row in assembly.layout.schedule.actions
    ]
    schedule = replace(assembly.layout.schedule, actions=tuple(rows))
    layout = replace(assembly.layout, schedule=schedule)
    session.assembly = assemble(
        layout, assembly.settings, assembly.collectives, assembly.tied, session.optimizers
    )


def _own_error(failure: StageError) -> BaseException:
    """Return what the layer raised, with a note of where it did."""
    cause = failure.__cause__
    if cause is None:
        return failure
    cause.add_note(str(failure).partition("\n")[0])
    return cause


def _seed() -> int:
    """Return a number that depends on the state of torch's generator, and leave that as it is."""
    state = torch.get_rng_state().numpy().tobytes()
    return int.from_bytes(blake2b(state, digest_size=8).digest()) >> 1
