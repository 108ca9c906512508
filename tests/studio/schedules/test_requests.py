"""Whatever the page of schedules is asked for, the answer is quick: a picture or a message."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest


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
