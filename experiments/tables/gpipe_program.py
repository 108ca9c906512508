"""GPipe's order as the runtime carries it out: forwards are recomputed while gradients are awaited.

rank 0 │ F0 F1 R0 .. .. B0 R1 B1
rank 1 │ .. F0 F1 R0 B0 R1 B1                         R: recompute, p = 2, m = 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import stageline as sl


def makespan(costs: sl.Costs, num_microbatches: int) -> float:
    """Return the time of a step in GPipe's order with these stages, one on each rank."""
    return timeline(costs, num_microbatches).makespan


def timeline(costs: sl.Costs, num_microbatches: int) -> sl.Timeline:
    """Return the simulated step.

    >>> even = sl.Costs(forward=[1, 1], input_grad=1, weight_grad=1, recompute=1)
    >>> timeline(even, 4).makespan  # 4 · (F + R + B) + F + B
    19.0
    """
    num_ranks = len(per_stage(costs, "forward"))
    schedule = sl.build_schedule("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return sl.simulate(schedule, costs)


def as_traced(simulated: sl.Timeline) -> sl.Timeline:
    """Return a timeline as a trace shows it: a recomputation is a span of its own, and early.

    In a simulated timeline it is the first part of its backward, as late as can be.
    """
    assert simulated.costs is not None  # it was simulated
    again = simulated.costs.per_stage("recompute", simulated.num_stages)
    rows = (tuple(_spans(row, again)) for row in simulated.spans)
    return sl.Timeline(tuple(rows), simulated.placement)


def _spans(row: Sequence[Any], again: Sequence[float]) -> Iterator[Any]:
    free = 0.0
    for span in row:
        recompute = again[span.action.stage] if span.action.kind is sl.Kind.B else 0.0
        if recompute:
            yield span._replace(start=free, end=free + recompute)
        yield span._replace(start=span.start + recompute)
        free = span.end


def per_stage(costs: sl.Costs, name: str, num_stages: int | None = None) -> tuple[float, ...]:
    """Return one field of costs by stage; the number of stages is that of the forwards."""
    if num_stages is None:
        forward = costs.forward
        num_stages = len(forward) if isinstance(forward, Sequence) else 1
    return costs.per_stage(name, num_stages)


def with_links_as_ranks(costs: sl.Costs) -> sl.Costs:
    """Return the costs of 2p - 1 ranks: between two stages, a rank that does what their link does.

    In GPipe's order no gradient is sent on a link before all values were, so a rank that handles
    one message at a time is a link whose messages queue.
    """
    assert isinstance(costs.links, sl.Link)
    rate = costs.links.bandwidth
    times = [size / rate for size in per_stage(costs, "message")]

    def mixed(name: str, of_links: Sequence[float]) -> list[float]:
        pairs = zip(per_stage(costs, name), of_links, strict=True)
        return [time for pair in pairs for time in pair][:-1]

    nothing = [0.0] * len(times)
    return replace(
        sl.Costs(),
        forward=mixed("forward", times),
        input_grad=mixed("input_grad", times),
        weight_grad=mixed("weight_grad", nothing),
        recompute=mixed("recompute", nothing),
        step=mixed("step", nothing),
    )
