"""Simulate a schedule or a program: compute when each action runs from the costs of the stages."""

from __future__ import annotations

from collections.abc import Iterator

from stageline.arguments import check_type
from stageline.costs import Costs
from stageline.errors import CostsError
from stageline.report.spans import Span, Spans, Transfer
from stageline.report.timeline import Timeline
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.action_times import ActionTimes
from stageline.schedules.check import check
from stageline.schedules.edges import chain
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import RECEIVE_KIND, Program, ProgramTasks, program_tasks
from stageline.schedules.schedule import Schedule
from stageline.schedules.task_graph import LaneTimes, TaskNumbering, dependencies_of, run_lanes


def simulate(work: Schedule | Program, costs: Costs | None = None) -> Timeline:
    """Return the timeline of a schedule or program in which everything takes what `costs` say.

    By default each of F, I and W takes 1. A schedule takes the same times as its program: a message
    is sent as soon as its value is computed, while the rank computes the next one. A rank that
    waits for a gradient recomputes meanwhile: its I or B starts before the gradient has arrived.

    >>> from stageline.schedules.build import build_schedule
    >>> timeline = simulate(build_schedule("gpipe", num_ranks=4, num_microbatches=4))
    >>> timeline.makespan, timeline.step_bubble
    (21.0, 0.4285714285714286)
    """
    costs = Costs() if costs is None else costs
    check_type("costs", costs, Costs, "use sl.Costs(forward=…)", CostsError)
    check(work)
    costs.check_num_stages(len(work.placement))
    if isinstance(work, Schedule) and (
        work.is_stream or any(map(costs.is_set, ("message", "reduce", "step")))
    ):
        work = lower(work)  # only a program has queued messages, reductions and steps
    times = ActionTimes(costs, work.placement, work.replicas)
    if isinstance(work, Schedule):
        return Timeline(_run_schedule(work, times), work.placement, costs, name=work.name)
    spans, sent = _run_program(work, times)
    return Timeline(
        spans, work.placement, costs, work.edges, sent, work.name, replicas=work.replicas
    )


def _run_schedule(schedule: Schedule, times: ActionTimes) -> Spans:
    numbering = TaskNumbering(schedule.num_stages, schedule.total_microbatches)
    lanes = [numbering.lane(row) for row in schedule.actions]
    durations = [0.0] * numbering.num_tasks
    for row, lane in zip(schedule.actions, lanes, strict=True):
        for (stage, kind, _, _, _), task in zip(row, lane, strict=True):
            durations[task] = times.durations[kind][stage]
    edges = chain(schedule.num_stages)
    dependencies = dependencies_of(numbering, edges, times.latency, times.lead)
    return _spans(schedule.actions, lanes, run_lanes(lanes, durations, dependencies))


def _spans(rows: tuple[tuple[Action, ...], ...], lanes: list[list[int]], run: LaneTimes) -> Spans:
    starts, ends = run.starts, run.ends
    return tuple(
        tuple([Span(a, starts[task], ends[task]) for a, task in zip(row, lane, strict=True)])
        for row, lane in zip(rows, lanes, strict=True)
    )


def _run_program(program: Program, times: ActionTimes) -> tuple[Spans, tuple[Transfer, ...]]:
    tasks = program_tasks(program, times.message_latency, times.lead)
    run = run_lanes(tasks.lanes, _program_durations(program, tasks, times), tasks.dependencies)
    steps_show = program.schedule.is_stream or times.has_step_time
    kept = COMPUTE | {Kind.STEP} if steps_show else COMPUTE
    spans = (
        tuple(
            Span(action, run.starts[task], run.ends[task])
            for action, task in zip(row, lane, strict=True)
            if action.kind in kept
        )
        for row, lane in zip(program.actions, tasks.lanes, strict=False)
    )
    return tuple(spans), tuple(_messages(program, tasks, times, run))


def _messages(
    program: Program, tasks: ProgramTasks, times: ActionTimes, run: LaneTimes
) -> Iterator[Transfer]:
    for (rank, send), task in tasks.background.items():
        if send.kind in RECEIVE_KIND:
            arrival = run.ends[task] + times.message_latency(send)
            target = program.routes.rank_of(send.peer, send.microbatch)
            yield Transfer(rank, target, send, run.starts[task], arrival)


def _program_durations(program: Program, tasks: ProgramTasks, times: ActionTimes) -> list[float]:
    durations = [0.0] * tasks.num_tasks
    for row, lane in zip(program.actions, tasks.lanes, strict=False):
        for action, task in zip(row, lane, strict=True):
            durations[task] = times.durations[action.kind][action.stage]
    for (_, action), task in tasks.background.items():
        is_message = action.kind in RECEIVE_KIND
        durations[task] = (
            times.message_occupancy(action) if is_message else times.reduction_time(action.stage)
        )
    return durations
