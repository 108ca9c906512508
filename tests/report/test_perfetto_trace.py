from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from stageline.costs import Costs
from stageline.report.perfetto import trace
from stageline.report.spans import Span, Transfer
from stageline.report.timeline import Timeline
from stageline.schedules.action import Action, Kind
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.simulation.simulate import simulate

Event = dict[str, Any]

TRANSFERS = (
    Transfer(0, 1, Action(0, Kind.SEND_F, 0, peer=1), 1.0, 1.0),
    Transfer(0, 1, Action(0, Kind.SEND_F, 1, peer=1), 2.0, 2.0),
    Transfer(1, 0, Action(1, Kind.SEND_B, 0, peer=0), 4.0, 4.0),
    Transfer(1, 0, Action(1, Kind.SEND_B, 1, peer=0), 7.0, 7.0),
)


def events(timeline: Timeline, phase: str) -> list[Event]:
    found = json.loads(trace(timeline))["traceEvents"]
    return [event for event in found if event["ph"] == phase]


def enclosing(timeline: Timeline, end: Event) -> Event:
    (found,) = (
        event
        for event in events(timeline, "X")
        if event["tid"] == end["tid"] and event["ts"] < end["ts"] < event["ts"] + event["dur"]
    )
    return found


def test_actions_are_complete_events_a_millisecond_to_the_unit(two_ranks: Timeline) -> None:
    assert events(two_ranks, "X")[2] == {
        "ph": "X",
        "name": "B 0",
        "cat": "backward",
        "pid": 1,
        "tid": 1,
        "ts": 4000,
        "dur": 2000,
        "args": {"stage": 0, "microbatch": 0},
    }


def test_lanes_are_named_and_in_the_order_of_ranks(two_ranks: Timeline) -> None:
    told = [(event["name"], event["tid"], event["args"]) for event in events(two_ranks, "M")]
    assert told == [
        ("process_name", 1, {"name": "1f1b"}),
        ("thread_name", 1, {"name": "rank 0"}),
        ("thread_sort_index", 1, {"sort_index": 0}),
        ("thread_name", 2, {"name": "rank 1"}),
        ("thread_sort_index", 2, {"sort_index": 1}),
    ]


def test_memory_is_a_counter_for_each_rank(two_ranks: Timeline) -> None:
    curves = defaultdict(list)
    for event in events(two_ranks, "C"):
        curves[event["name"]].append((event["ts"], event["args"]["memory"]))
    assert curves == {
        "rank 0": [(0, 1), (1000, 2), (6000, 1), (9000, 0)],
        "rank 1": [(0, 0), (1000, 1), (7000, 0)],
    }


def test_an_arrow_leads_from_the_writer_to_the_reader(two_ranks: Timeline) -> None:
    timeline = replace(two_ranks, sent=TRANSFERS)
    starts, ends = events(timeline, "s"), events(timeline, "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == [0, 1, 2, 3]
    assert all(event["bp"] == "e" for event in ends)
    arrows = [
        (enclosing(timeline, start)["name"], enclosing(timeline, end)["name"], end["tid"])
        for start, end in zip(starts, ends, strict=True)
    ]
    assert arrows == [("F 0", "F 0", 2), ("F 1", "F 1", 2), ("B 0", "B 0", 1), ("B 1", "B 1", 1)]


def test_every_simulated_message_has_its_arrow() -> None:
    timeline = simulate(one_f_one_b(4, 8), Costs(forward=1 / 3, transfer=0.1))
    assert len(timeline.transfers) == 2 * 3 * 8
    starts, ends = events(timeline, "s"), events(timeline, "f")
    assert len(starts) == len(ends) == len(timeline.transfers)
    assert all(start["ts"] < end["ts"] for start, end in zip(starts, ends, strict=True))


def test_arrows_of_a_second_step_lie_in_the_second_step(two_ranks: Timeline) -> None:
    later = tuple(
        row + tuple(Span(action, start + 20, end + 20) for action, start, end in row)
        for row in two_ranks.spans
    )
    timeline = replace(two_ranks, spans=later, sent=TRANSFERS * 2)
    starts = [int(event["ts"] > 20_000) for event in events(timeline, "s")]
    ends = [int(event["ts"] > 20_000) for event in events(timeline, "f")]
    assert starts == ends == [0, 0, 0, 0, 1, 1, 1, 1]


def test_neighbours_share_an_instant_whatever_the_rounding() -> None:
    costs = Costs(forward=1 / 3, input_grad=0.1, weight_grad=1 / 7)
    lanes = defaultdict(list)
    for event in events(simulate(one_f_one_b(4, 16), costs), "X"):
        lanes[event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for lane in lanes.values():
        assert all(start + length <= after for (start, length), (after, _) in pairwise(lane))


@pytest.mark.parametrize("name", ["odd_one", "nothing"])
def test_odd_timelines_are_valid_traces(name: str, request: pytest.FixtureRequest) -> None:
    timeline: Timeline = request.getfixturevalue(name)
    assert len(events(timeline, "X")) == sum(map(len, timeline.spans))
    assert len(events(timeline, "M")) == 1 + 2 * timeline.num_ranks
