"""The messages of a timeline, from what ran when: each leaves as its value is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stageline.costs import Costs
from stageline.report.spans import Spans, Transfer
from stageline.schedules.action_times import ActionTimes
from stageline.schedules.edges import Edge, Routes
from stageline.schedules.placement import Placement


def transfers(
    spans: Spans, placement: Placement, edges: Iterable[Edge], costs: Costs
) -> Iterator[Transfer]:
    routes, times = Routes(tuple(edges), placement), ActionTimes(costs, placement)
    for rank, row in enumerate(spans):
        for action, _, end in row:
            for send in routes.sends(action):
                arrival = end + times.latency(send.stage, send.peer)
                yield Transfer(rank, placement[send.peer], send, end, arrival)
