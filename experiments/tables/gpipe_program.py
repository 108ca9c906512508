"""GPipe's order as the runtime carries it out: forwards are recomputed while gradients are awaited.

    rank 0 │ F0 F1 R0 .. .. B0 R1 B1
    rank 1 │ .. F0 F1 R0 B0 R1 B1                         R: recompute, p = 2, m = 2

`sl.simulate` adds `Costs.recompute` to a backward, after the gradient's arrival. Here a
recomputation is the forward of a further stage on the same rank, which nothing reads, so it starts
as soon as the rank is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import stageline as sl


def makespan(costs: sl.Costs, num_microbatches: int) -> float:
    """Return the time of a step in GPipe's order with these stages, one on each rank."""
    return timeline(costs, num_microbatches).makespan


def timeline(costs: sl.Costs, num_microbatches: int) -> sl.Timeline:
    """Return the simulated step; stages from the middle on are recomputations.

    >>> even = sl.Costs(forward=[1, 1], input_grad=1, weight_grad=1, recompute=1)
    >>> timeline(even, 4).makespan  # 4 · (F + R + B) + F + B
    19.0
    """
    num_ranks = len(per_stage(costs, "forward"))
    program = recomputing_ahead(num_ranks, num_microbatches)
    return sl.simulate(program, with_recomputations(costs, num_ranks))


def as_traced(simulated: sl.Timeline) -> sl.Timeline:
    """Return a timeline as a trace would show it: recomputations are spans of their backwards."""
    num_stages = simulated.num_stages // 2
    rows = []
    for row in simulated.spans:
        again = {
            span.action.microbatch: span
            for span in row
            if span.action.stage >= num_stages and span.action.kind is sl.Kind.F
        }
        kept = []
        for span in row:
            if span.action.stage < num_stages:
                if span.action.kind is sl.Kind.B:
                    kept.append(again[span.action.microbatch]._replace(action=span.action))
                kept.append(span)
        rows.append(tuple(kept))
    return sl.Timeline(tuple(rows), simulated.placement[:num_stages])


def recomputing_ahead(num_ranks: int, num_microbatches: int) -> sl.Program:
    """Return GPipe's program with stages for the recomputations after those of the model."""
    rows = (" ".join(_row(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    chain = [(stage, stage + 1) for stage in range(num_ranks - 1)]
    return sl.lower(sl.Schedule.from_text(*rows), chain)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[str]:
    again = num_ranks + rank
    yield from (f"{rank}F{number}" for number in range(num_microbatches))
    for number in range(num_microbatches):
        yield from (f"{again}F{number}", f"{again}B{number}", f"{rank}B{number}")


def with_recomputations(costs: sl.Costs, num_stages: int) -> sl.Costs:
    """Return the costs of the stages, and of as many recomputations."""
    nothing = (0.0,) * num_stages
    forward, again = (per_stage(costs, name, num_stages) for name in ("forward", "recompute"))
    names = ("input_grad", "weight_grad", "message", "step")
    rest = {name: per_stage(costs, name, num_stages) + nothing for name in names}
    return sl.Costs(forward=forward + again, links=costs.links, **rest)


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
