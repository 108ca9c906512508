"""Forwards that are repeated after a wrong guess keep the order of channels, and do not deadlock.

Their messages are not part of a program: they are written down here as `LateClipping` runs them.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import pytest
import torch
from tests.schedules.simulated_channels import Issue, Steps, Wait, completes
from torch import nn

import stageline as sl
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.tasks import Task
from stageline.runtime.optimizers.speculation import SENDS, Speculation, sent_as, speculation
from stageline.schedules.action import COMPUTE, Action
from stageline.schedules.edges import Routes


def stream_loop(name: str, num_ranks: int) -> Loop:
    """Return the loop of a pipeline that steps first and clips after."""
    with sl.Pipeline(
        nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)]),
        nn.functional.mse_loss,
        num_ranks=num_ranks,
        num_microbatches=2 * num_ranks,
        schedule=name,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        options=sl.Options(max_norm=1.0),
    ) as pipe:
        assert pipe._session.assembly.clips_late
        return pipe._session.assembly.stream_loop


def steps_of(loop: Loop, is_wrong: Sequence[bool], rng: Random) -> Steps:
    """Return what each rank asks of its channels; `is_wrong` says which guesses were, if any."""
    spec = speculation(loop.tasks)
    rows: Steps = []
    for rank in range(loop.num_ranks):
        guesses = [not wrong or rng.random() < 0.6 for wrong in is_wrong]
        rows.append([*_steps(RankSteps(spec, rank, loop.period.routes), is_wrong, guesses)])
    return rows


class RankSteps(NamedTuple):
    """One rank of a loop, and how it names its messages."""

    spec: Speculation
    rank: int
    routes: Routes

    def run(self, tasks: Iterable[Task], minibatch: int, *, again: bool) -> Iterator[Issue | Wait]:
        """Yield the steps of some tasks; messages that are sent again have other names."""

        def name(send: Action) -> tuple[int, Action]:
            return minibatch, self.spec.second(send) if again else send

        for task in tasks:
            action = task.action
            if action.kind in SENDS.values():
                yield Issue(self.channel(action), name(action))
            elif action.kind in SENDS:
                yield Issue(self.channel(sent_as(action)), name(sent_as(action)), is_receive=True)
            elif action.kind in COMPUTE:
                yield from (Wait(name(send)) for send, is_far in task.awaits if is_far)
            elif task.is_last_step:
                yield Issue("all", minibatch, len(self.spec.by_rank))

    def channel(self, send: Action) -> tuple[int, int]:
        source, target = (
            self.routes.rank_of(stage, send.microbatch) for stage in (send.stage, send.peer)
        )
        return source, target


def _steps(
    this: RankSteps, is_wrong: Sequence[bool], guesses: Sequence[bool]
) -> Iterator[Issue | Wait]:
    """Yield what a rank does in each mini-batch, as `LateClipping.run_rank` and `step` do it."""
    own = this.spec.by_rank[this.rank]
    for minibatch, guess in enumerate(guesses):
        yield from this.run(own.first, minibatch, again=False)
        if minibatch and guesses[minibatch - 1]:
            yield Wait(minibatch - 1)  # for the norms of all ranks
        repeats = minibatch > 0 and is_wrong[minibatch - 1]
        if repeats:
            for _, send, was_asked in own.stale:
                if not was_asked:
                    yield Issue(this.channel(send), (minibatch, send), is_receive=True)
                yield Wait((minibatch, send))
            yield from this.run(own.first, minibatch, again=True)
        yield from this.run(own.rest, minibatch, again=repeats)
        if not guess:
            yield Wait(minibatch)


@pytest.mark.parametrize("name", sl.schedule_names(synchronous=True))
def test_repeated_forwards_do_not_deadlock_on_ordered_channels(name: str) -> None:
    loop = stream_loop(name, num_ranks=3)
    for seed in range(20):
        rng = Random(seed)
        is_wrong = [rng.random() < 0.6 for _ in range(4)]
        assert completes(steps_of(loop, is_wrong, rng), rng), (seed, is_wrong)
