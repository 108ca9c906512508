"""Run the model as a pipeline of threads, to measure what layers that run alone do not show.

    layer alone   │ F │        F  F  F  as one stage take less than their sum, or more
    trial, rank 0 │ F0 F1 .. B0 F2 B1      gaps: from an action to the next, on its own rank
    trial, rank 1 │ .. F0 B0 F1 B1         and to one on another rank that waits for it

It has a stage for each rank, and runs 1F1B for F and B, and ZB-H1 for F, I and W.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

from stageline.model.inputs import microbatch_inputs
from stageline.planning.profiling.profiled_model import ProfiledModel
from stageline.planning.profiling.resize_batch import resize_batch
from stageline.planning.profiling.trial.stage_overheads import HostCosts
from stageline.runtime.backends.threads import ThreadsBackend
from stageline.runtime.engine.minibatch import MiniBatch, Purpose, RecordedAction
from stageline.runtime.engine.open_session import open_session
from stageline.runtime.engine.session import Session
from stageline.runtime.placement.layout import Layout
from stageline.runtime.settings import Settings
from stageline.runtime.stage.stage_values import Target
from stageline.schedules.action import Kind
from stageline.schedules.build import build_schedule

WHOLE, IN_HALVES = "1f1b", "zb_h1"
# A step's first micro-batches take up to 15 % longer here than later ones: their memory is new to
# the operating system. So a trial step has as many micro-batches as a step on the example has, but
# no more than are needed for the first ones to weigh as little as in most plans.
MOST_MICROBATCHES_PER_RANK = 4


class TrialStep(NamedTuple):
    """The times of one step of a trial pipeline, in seconds."""

    actions: Mapping[tuple[Kind, int], float]  # means over micro-batches, by kind and stage
    action_gap: float  # mean from an action to the next one on its rank, if nothing was missing
    handoff: float  # mean from an action to one on another rank that waited for it
    outside: float  # from the call to the first action, and from the last one to the return


class TrialPipeline:
    """A pipeline of the profiled model. State: the sessions that were opened so far."""

    def __init__(self, profiled: ProfiledModel, balance: Sequence[int]) -> None:
        self.profiled = profiled
        self.stages = [range(*pair) for pair in pairwise(accumulate(balance, initial=0))]
        self.session = cache(self._open)
        self.opened: list[Session] = []

    def _open(self, schedule_name: str, num_microbatches: int) -> Session:
        num_ranks = len(self.stages)
        schedule = build_schedule(
            schedule_name, num_ranks=num_ranks, num_microbatches=num_microbatches
        )
        devices = (None,) * num_ranks
        backend = ThreadsBackend((None,) * num_ranks)
        assert self.profiled.loss_fn is not None  # a trial trains
        settings = Settings(self.profiled.loss_fn, ("never",) * num_ranks)
        layout = Layout(
            self.profiled.layers,
            schedule,
            tuple(self.stages),
            devices,
            frozenset(range(num_ranks)),
            uses_threads=True,
        )
        session = open_session(layout, settings, backend, seed=0, init_fn=None)
        self.opened.append(session)
        return session

    def run(self, num_samples: int) -> list[TrialStep]:
        """Run a step of each schedule, with micro-batches of this size."""
        ranks = len(self.stages)
        count = self.profiled.num_samples // num_samples
        count = min(max(count, ranks), MOST_MICROBATCHES_PER_RANK * ranks)
        return [self._step(self.session(each, count), num_samples) for each in (WHOLE, IN_HALVES)]

    def _step(self, session: Session, num_samples: int) -> TrialStep:
        minibatch = self._minibatch(session, num_samples)
        with session.recording() as recorder:
            start = perf_counter()
            session.run(minibatch, Purpose.TRAIN)
            seconds = perf_counter() - start
        session.num_steps += 1
        assert recorder.recording is not None  # the step was recorded
        return summarize([row for row in recorder.recording.times.values() if row], seconds)

    def _minibatch(self, session: Session, num_samples: int) -> MiniBatch:
        profiled, count = self.profiled, session.assembly.layout.schedule.num_microbatches
        inputs = microbatch_inputs(profiled.layers, resize_batch(profiled.inputs, num_samples))
        minibatch = MiniBatch(
            [dict(inputs) for _ in range(count)], 0, session.num_steps, 0, profiled.context
        )
        assert profiled.loss_fn is not None
        target = resize_batch(profiled.target, num_samples)
        minibatch.targets = [Target(profiled.loss_fn, target, 1.0 / count)] * count
        return minibatch

    def close(self) -> None:
        for session in self.opened:
            session.close()


class Trial:
    """Rounds of steps of a trial pipeline. State: the steps that were run, by size."""

    def __init__(self, pipeline: TrialPipeline, sizes: Sequence[int]) -> None:
        self.pipeline = pipeline
        self.rounds: dict[int, list[list[TrialStep]]] = {size: [] for size in sizes}

    def run_round(self) -> None:
        """Run a step of each schedule for every size."""
        for size, rounds in self.rounds.items():
            rounds.append(self.pipeline.run(size))

    def forget(self) -> None:
        """Delete the steps that were run so far: they have warmed up the pipeline."""
        for rounds in self.rounds.values():
            rounds.clear()

    def near(self, size: int) -> tuple[list[range], list[list[TrialStep]]]:
        """Return the stages, and the rounds of a size, or of the closest one that was tried."""
        closest = min(self.rounds, key=lambda tried: abs(tried - size))
        return self.pipeline.stages, self.rounds[closest]

    @property
    def steps(self) -> list[TrialStep]:
        return [step for rounds in self.rounds.values() for steps in rounds for step in steps]


def summarize(rows: Sequence[Sequence[RecordedAction]], seconds: float) -> TrialStep:
    """Return what the recorded actions of a step say, by rank; `seconds` is the whole step."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    gaps, handoffs = [], []
    for row in rows:
        for time in row:
            times[time.action.kind, time.action.stage].append(time.end - time.start)
            if time.sent > time.asked:
                handoffs.append(time.start - time.sent)
        for before, after in pairwise(row):
            if after.sent <= after.asked:
                gaps.append(after.start - before.end)
    began, ended = min(row[0].asked for row in rows), max(row[-1].end for row in rows)
    return TrialStep(
        {key: fmean(values) for key, values in times.items()},
        fmean(gaps or [0.0]),
        fmean(handoffs or [0.0]),
        max(0.0, seconds - (ended - began)),
    )


def median_actions(steps: Sequence[TrialStep]) -> dict[tuple[Kind, int], float]:
    """Return the median over steps of the mean time of an action, by kind and stage.

    Means within a step, because a stage's time is that of all its micro-batches; medians over
    steps, because a burst of other load lasts for a step or two.
    """
    return {key: median(step.actions[key] for step in steps) for key in steps[0].actions}


def host_costs(steps: Sequence[TrialStep]) -> HostCosts:
    """Return the medians over all steps of what the host takes."""
    return HostCosts(
        median(step.action_gap for step in steps),
        median(step.handoff for step in steps),
        median(step.outside for step in steps),
    )
