"""Whatever the page of schedules is asked for, the answer is quick: a picture or a message."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

import stageline as sl
from stageline.studio.schedules.fields import SearchFields
from stageline.studio.schedules.orders import OrderStore
from stageline.studio.schedules.search import WatchedSearch


def answer(studio: str, path: str, body: object) -> tuple[int, bytes]:
    """Return the status and the content with which a request is answered."""
    parts = urlsplit(studio)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"{parts.path}api/schedules/{path}", text, headers)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def error_of(studio: str, path: str, body: object) -> str:
    """Return the message with which a request is refused."""
    status, content = answer(studio, path, body)
    assert status == 422
    return str(json.loads(content)["error"])


ONE: dict[str, Any] = {"family": "1f1b"}
REFUSED = [
    ({**ONE, "num_microbatches": 10**9}, {}, "input should be less than or equal to 1024"),
    ({**ONE, "num_ranks": 0}, {}, "input should be greater than or equal to 1"),
    ({**ONE, "num_ranks": "4"}, {}, "input should be a valid integer"),
    ({**ONE, "num_ranks": True}, {}, "input should be a valid integer"),
    ({**ONE, "num_ranks": 10**400}, {}, "a number of 401 digits"),
    ({**ONE, "num_ranks": 64, "num_minibatches": 64}, {}, "the page draws 30,000 at most"),
    ({"family": "zbv", "num_ranks": 64, "num_microbatches": 1024, "num_minibatches": 2}, {}, "use"),
    ({"family": "zb_1p"}, {}, "zb_1p depends on the costs: search for it"),
    ({"family": "x" * 10_000}, {}, "string should have at most 100 characters"),
    ({**ONE, "moves": [[0, 0, 99]]}, {}, "position 99 of rank 0 does not exist"),
    ({**ONE, "moves": [[0, 0, 1]] * 201}, {}, "at most 200 items"),
    ({**ONE, "moves": [[-1, 0, 0]]}, {}, "input should be greater than or equal to 0"),
    ({**ONE, "unknown": 1}, {}, "extra inputs are not permitted"),
    (ONE, {"forward": float("nan")}, "forward is nan, but a cost is a finite number >= 0"),
    (ONE, {"forward": -1}, "forward is -1"),
    (ONE, {"forward": 1e300}, "use other units"),
    (ONE, {"forward": [1, "x", 1, 1]}, "forward[1] is 'x'"),
    (ONE, {"forward": [1, 2]}, "forward has 2 values, but the schedule has 4 stages"),
    (ONE, {"links": {"latency": -1}}, "latency is -1"),
    (ONE, {"links": [1]}, "must have a Link for each"),
    (ONE, {"retained": 5}, "retained is 5.0 on stage 0"),
    (ONE, [1], "input should be a valid dictionary"),
]


@pytest.mark.parametrize(
    ("schedule", "costs", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_what_cannot_be_shown_is_refused(
    shared_studio: str, schedule: object, costs: object, message: str
) -> None:
    body = {"schedules": [schedule], "costs": costs}
    assert message in error_of(shared_studio, "pictures", body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("nonsense", "the request is not JSON"),
        ("[" * 100_000, "the request is not JSON"),
        ('{"schedules": [{"num_ranks": 1' + "0" * 5000 + "}]}", "the request is not JSON"),
        ({"schedules": [{}] * 9}, "at most 8 items"),
        ({"schedules": [ONE], "memory_limit": -1}, "a rank needs at least 1"),
        ('{"schedules": [{"family": "1f1b"}], "memory_limit": Infinity}', "counts micro-batches"),
        ({"schedules": [ONE], "memory_limit": "much"}, "is not a size in bytes"),
    ],
)
def test_what_is_no_request_is_refused(shared_studio: str, body: object, message: str) -> None:
    assert message in error_of(shared_studio, "pictures", body)


def test_a_result_that_is_not_kept_has_to_be_searched_for_again(shared_studio: str) -> None:
    search = {"num_ranks": 2, "num_microbatches": 2}
    body = {"schedules": [{"search": search, **search}]}
    message = error_of(shared_studio, "pictures", body)
    assert message == "the result of this search is no longer kept: search again"


def test_an_order_that_does_not_complete_is_saved_as_csv_only(shared_studio: str) -> None:
    schedule = {**ONE, "moves": [[0, 0, 15]]}
    error = error_of(shared_studio, "save", {"schedule": schedule, "suffix": "svg"})
    assert error.startswith("only CSV can hold an order that does not complete: 0B0 comes before")
    _, content = answer(shared_studio, "save", {"schedule": schedule, "suffix": "csv"})
    assert content.startswith(b"0F1,0F2,0F3,0B0")


def test_costs_that_cannot_be_used_end_a_search_with_a_message(shared_studio: str) -> None:
    body = {"num_ranks": 2, "num_microbatches": 2, "costs": {"forward": [1]}}
    _, content = answer(shared_studio, "search", body)
    assert json.loads(content)["error"].startswith("forward has 1 values")


def test_actions_without_duration_are_shown(shared_studio: str) -> None:
    costs = dict.fromkeys(("forward", "input_grad", "weight_grad"), 0)
    body = {"schedules": [ONE], "costs": costs}
    status, content = answer(shared_studio, "pictures", body)
    assert status == 200
    assert b'"makespan": 0.0' in content


LINES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"family": "gpipe"}, {}),
    ({"family": "zbv"}, {"forward": [1, 2, 1, 1], "transfer": 0.1, "links": {"latency": 0.5}}),
    ({"family": "interleaved_1f1b", "chunks_per_rank": 3, "num_microbatches": 12}, {"retained": 0}),
    ({"family": "1f1b", "num_minibatches": 2}, {"parameters": 3, "step": 1}),
    ({"family": "pipedream", "num_minibatches": 3}, {"activation": 6}),
    ({"family": "1f1b", "moves": [[1, 1, 2]]}, {}),
]


def header_of(studio: str, schedule: object, costs: object) -> Any:
    status, content = answer(studio, "pictures", {"schedules": [schedule], "costs": costs})
    assert status == 200
    return json.loads(content[4 : 4 + int.from_bytes(content[:4], "little")])[0]


def assert_line_makes(studio: str, schedule: object, costs: object) -> None:
    status, line = answer(studio, "save", {"schedule": schedule, "costs": costs, "suffix": "py"})
    assert status == 200
    names: dict[str, sl.Timeline] = {}
    exec(line.decode(), names)  # noqa: S102  as the user does
    timeline, header = names["timeline"], header_of(studio, schedule, costs)
    assert timeline.makespan == header["makespan"]
    assert timeline.lower_bound == header["lowerBound"]
    assert list(timeline.peak_memory) == header["peakMemory"]
    assert timeline.step_bubble == pytest.approx(header["stepBubble"])
    assert timeline.span_bubble == pytest.approx(header["spanBubble"])


@pytest.mark.parametrize(("schedule", "costs"), LINES, ids=[each["family"] for each, _ in LINES])
def test_the_line_of_python_makes_the_same_timeline(
    shared_studio: str, schedule: dict[str, Any], costs: dict[str, Any]
) -> None:
    assert_line_makes(shared_studio, schedule, costs)


def test_the_line_of_a_search_finds_the_same_order(shared_studio: str) -> None:
    sizes = {"num_ranks": 3, "num_microbatches": 4}
    rest = {"costs": {"forward": 2}, "memory_limit": 3, "placement": "v", "time_budget": 0.05}
    search = {**sizes, **rest, "seed": 1}
    status, content = answer(shared_studio, "search", search)
    assert status == 200
    assert "makespan" in json.loads(content.splitlines()[-1])["message"]
    assert_line_makes(shared_studio, {"search": search, **sizes}, {"forward": 2})


def test_a_long_edited_order_is_read_from_its_csv_file(shared_studio: str) -> None:
    schedule = {**ONE, "num_ranks": 16, "num_microbatches": 128, "moves": [[0, 1, 2]]}
    _, line = answer(shared_studio, "save", {"schedule": schedule, "suffix": "py"})
    assert b'sl.Schedule.from_csv("1f1b-edited.csv")' in line


def test_a_search_that_nobody_watches_is_given_up() -> None:
    fields = SearchFields(num_ranks=8, num_microbatches=64, time_budget=60)
    search = WatchedSearch(OrderStore(), fields, asyncio.new_event_loop())
    search.is_abandoned.set()
    search.run()
    assert search.lines.empty()
    search.loop.close()
