"""The causes that make a pipeline slow: one function for each, which finds it in a measured step.

A gain is what the simulation of the step takes less without the cause. It holds if times of actions
stay what they were: a micro-batch of half the samples takes half the time, and no core is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stageline.errors import StagelineError
from stageline.report.summary import number, percent
from stageline.runs.findings.finding import Finding
from stageline.runs.findings.measured_step import Balance, MeasuredStep
from stageline.runs.records import Metrics
from stageline.schedules.build import build_schedule
from stageline.schedules.families.registry import FAMILIES
from stageline.schedules.schedule import Schedule

LEAST_SLOWNESS = 1.2  # of a rank: medians of the same work differ by some percent
LEAST_VARIATION = 0.1  # of a step: the simulation of a quiet one is off by some percent
MOST_WORK = 20_000  # actions of a schedule that is tried: simulated in 0.1 s
WORTH_DOUBLING = 3.0  # percent that twice as many micro-batches have to bring again
SEARCHED = ("zb_1p", "zb_2p")  # takes seconds
SAME_MEMORY = 1 + 1e-9
MOST_LISTED = 32  # stages or ranks in a text


def uneven_stages(step: MeasuredStep) -> Iterator[Finding]:
    """Find a cut into stages that take unequal times, though the layers allow equal ones."""
    even = _without_slowness(step)
    num_stages = len(step.stages)
    other = even.best_balance(num_stages)
    if num_stages == 1 or other is None:
        return
    totals = [sum(times) for times in even.stages]
    slowest, mean = max(totals), sum(totals) / num_stages
    before = even.simulate(even.schedule, even.stages).makespan
    after = even.simulate(even.schedule, even.stage_times(other)).makespan
    if other != step.balance and after < before:
        gain = step.gain(step.simulated * after / before)
        yield Finding(
            "uneven stages",
            f"stage {totals.index(slowest)} takes {number(slowest)} ms for a micro-batch, "
            f"and the mean of all stages is {number(mean)} ms",
            f"use {_balance(other)} instead of {list(step.balance)[:MOST_LISTED]}, or pipe.replan",
            gain,
        )


def slow_rank(step: MeasuredStep) -> Iterator[Finding]:
    """Find ranks that take longer for the same work than others."""
    slowness = step.slowness()
    slow = [rank for rank, ratio in enumerate(slowness) if ratio >= LEAST_SLOWNESS]
    if not slow:
        return
    worst = max(slow, key=lambda rank: slowness[rank])
    names = ", ".join(map(str, slow[:MOST_LISTED]))
    even = _without_slowness(step)
    yield Finding(
        "a slow rank" if len(slow) == 1 else "slow ranks",
        f"rank {names} {'takes' if len(slow) == 1 else 'take'} up to "
        f"{slowness[worst]:.2g} times as long as the same work takes elsewhere",
        "look what else runs on its device, at its clock and its temperature; or give it fewer "
        "layers: pipe.replan does, with a profile",
        step.gain(even.simulate(even.schedule, even.stages).makespan),
    )


def few_microbatches(step: MeasuredStep) -> Iterator[Finding]:
    """Find a bubble that more micro-batches of fewer samples would make smaller."""
    count = step.schedule.num_microbatches
    gain, chosen = 0.0, 0
    for more in (2 * count, 4 * count):
        other = _built(step, step.configuration.schedule, more)
        if other is not None and other.placement == step.schedule.placement:
            found = step.gain(step.simulate(other, step.stages, count / more).makespan)
            if found > gain + WORTH_DOUBLING:
                gain, chosen = found, more
    if chosen:
        bubble = step.timeline.step_bubble
        yield Finding(
            "few micro-batches",
            f"{count} micro-batches on {step.schedule.num_ranks} ranks, which are idle for "
            f"{percent(bubble)} of the step",
            f"use num_microbatches={chosen}; less is gained if half the samples take more than "
            "half the time",
            gain,
        )


def another_schedule(step: MeasuredStep) -> Iterator[Finding]:
    """Find the schedule that is fastest with these times, in the memory of the present one."""
    if step.configuration.schedule not in FAMILIES:
        return
    most = max(step.simulate(step.schedule, step.stages).peak_activations)
    found = []
    for name, family in FAMILIES.items():
        if not family.is_synchronous or name == step.configuration.schedule:
            continue
        option = _option(step, name)
        if option is not None and option.memory <= most * SAME_MEMORY:
            found.append(option)
    best = min(found, key=lambda option: option.milliseconds, default=None)
    if best is not None:
        balance = "" if best.balance == step.balance else f", {_balance(best.balance)}"
        yield Finding(
            "another schedule",
            f"{step.configuration.schedule} leaves ranks idle for "
            f"{percent(step.timeline.step_bubble)} of the step",
            f'use schedule="{best.name}"{balance}, which holds no more activations',
            step.gain(best.milliseconds),
        )


def slow_messages(step: MeasuredStep) -> Iterator[Finding]:
    """Find time that ranks wait for messages in transit."""
    free = (0.0,) * len(step.stages)
    longest = max(step.transfers)
    if longest > 0:
        yield Finding(
            "messages between stages",
            f"a message takes {number(longest)} ms, and a stage "
            f"{number(max(map(sum, step.stages)))} ms for a micro-batch",
            "send less: cut where activations are small, use bfloat16, fewer stages per rank, or "
            "faster links; this is the gain if messages took no time",
            step.gain(step.simulate(step.schedule, step.stages, transfers=free).makespan),
        )


def varying_times(step: MeasuredStep) -> Iterator[Finding]:
    """Find actions that sometimes take much longer than usual, so that other ranks wait."""
    if step.makespan * (1 - LEAST_VARIATION) > step.simulated:
        share = step.makespan / (step.makespan + step.between)
        yield Finding(
            "varying times",
            f"a recorded step takes {number(step.makespan)} ms, and {number(step.simulated)} ms if "
            "each action takes its median time",
            "look for what takes the cores at times: other programs, workers of the loader, more "
            "threads than cores",
            100 * share * (1 - step.simulated / step.makespan),
        )


def waiting_for_data(step: MeasuredStep) -> Iterator[Finding]:
    """Find the time that steps wait for their batches."""
    advice = "load batches in the background, as a DataLoader does with num_workers=2"
    if step.metrics is not None:
        yield from _waiting("data", step.metrics, step.metrics.data_seconds, advice)


def waiting_for_checkpoints(step: MeasuredStep) -> Iterator[Finding]:
    """Find the time that steps wait for a copy of the state, or for an earlier save."""
    if step.metrics is not None:
        advice = "save less often: give sl.fit a larger save_every"
        yield from _waiting("checkpoints", step.metrics, step.metrics.save_seconds, advice)


def _waiting(what: str, last: Metrics, seconds: Sequence[float], advice: str) -> Iterator[Finding]:
    longest = max(seconds, default=0.0)
    if last.step_seconds:
        yield Finding(
            f"waiting for {what}",
            f"a step takes {number(1e3 * last.step_seconds)} ms, {number(1e3 * longest)} ms of it "
            f"waiting for {what}",
            advice,
            100 * min(1.0, longest / last.step_seconds),
        )


@dataclass(frozen=True)
class ScheduleOption:
    """A schedule that could be used, with its simulated time and peak of activations."""

    name: str
    balance: Balance
    milliseconds: float
    memory: float  # in activations of all stages of a rank


def _balance(balance: Balance) -> str:
    """Return an argument of `Pipeline`; a long one is for `replan` to find."""
    return f"balance={list(balance)}" if len(balance) <= MOST_LISTED else "stages of equal times"


def _option(step: MeasuredStep, name: str) -> ScheduleOption | None:
    schedule = _built(step, name, step.schedule.num_microbatches)
    if schedule is None:
        return None
    if schedule.placement == step.schedule.placement:
        balance, stages = step.balance, step.stages
    else:
        found = step.best_balance(schedule.num_stages)
        if found is None:
            return None
        balance, stages = found, step.stage_times(found)
    timeline = step.simulate(schedule, stages)
    return ScheduleOption(name, balance, timeline.makespan, max(timeline.peak_activations))


def _built(step: MeasuredStep, name: str, num_microbatches: int) -> Schedule | None:
    """Return a schedule on the run's ranks; None if there is none, or it is too large to try."""
    family, ranks = FAMILIES.get(name), step.schedule.num_ranks
    batch = (step.metrics.batch_size if step.metrics else None) or float("inf")
    samples = batch / max(step.configuration.num_replicas, 1)
    if family is None or name in SEARCHED or num_microbatches > samples:
        return None
    built = max(num_microbatches, 2 * ranks if family.is_filled_by_slots else 1)
    if 3 * ranks * family.chunks * built > MOST_WORK:
        return None
    chunks = len(step.stages) // ranks
    has_chunks = "chunks_per_rank" in family.options and chunks > 1
    try:
        return build_schedule(
            name,
            num_ranks=ranks,
            num_microbatches=num_microbatches,
            chunks_per_rank=chunks if has_chunks else None,
        )
    except StagelineError:
        return None  # it needs another number of micro-batches


def _without_slowness(step: MeasuredStep) -> MeasuredStep:
    """Return the step as it would be if all ranks were as fast as the usual one."""
    slowness = [ratio if ratio >= LEAST_SLOWNESS else 1.0 for ratio in step.slowness()]
    return step.faster(slowness)
