"""Run a schedule or a program on paper: when everything happens, and what it holds in memory."""

from __future__ import annotations

from stageline.costs import Costs
from stageline.report.timeline import Span, Timeline
from stageline.schedules.action import Kind
from stageline.schedules.precedence import Numbering, chain, run_lanes, waits_of
from stageline.schedules.schedule import Schedule
from stageline.simulation.memory import memory_curves


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    costs = costs or Costs()
    numbering = Numbering(schedule.num_stages, schedule.num_microbatches)
    lanes = [numbering.lane(row) for row in schedule.actions]
    transfer = costs.per_stage("transfer", schedule.num_stages)
    home = schedule.placement

    def delay(writer: int, reader: int) -> float:
        far = home[writer] != home[reader]
        return transfer[writer] + costs.link(home[writer], home[reader]).latency if far else 0.0

    run = run_lanes(lanes, _durations(schedule, costs, numbering), waits_of(numbering, chain(len(home)), delay))
    spans = tuple(
        tuple(Span(action, run.starts[task], run.ends[task]) for action, task in zip(row, lane, strict=True))
        for row, lane in zip(schedule.actions, lanes, strict=True)
    )
    return Timeline(spans, home, memory_curves(spans, home, costs), name=schedule.name)


def _durations(schedule: Schedule, costs: Costs, numbering: Numbering) -> list[float]:
    fields = ("forward", "input_grad", "weight_grad", "recompute")
    forward, input_grad, weight_grad, recompute = (costs.per_stage(f, schedule.num_stages) for f in fields)
    size = numbering.num_microbatches
    durations = [time for time in forward for _ in range(size)]
    durations += [a + b for a, b in zip(input_grad, recompute, strict=True) for _ in range(size)]
    durations += [time for time in weight_grad for _ in range(size)]
    for row in schedule.actions:
        for stage, kind, microbatch, _ in row:
            if kind is Kind.B:
                durations[numbering.row(Kind.B, stage) + microbatch] += weight_grad[stage]
    return durations
