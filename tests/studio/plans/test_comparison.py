"""All ways to train, as the page asks for them: which is best, why others lost, what is refused."""

from __future__ import annotations

import json
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.studio.plans.requests import (
    as_text,
    compared,
    posted,
    question,
    small_cluster,
    small_profile,
)

import stageline as sl
from stageline.errors import PlanError
from stageline.planning.cluster.cluster import Cluster, Device, Level
from stageline.planning.search.search import ReportProgress
from stageline.studio.plans import routes
from stageline.studio.plans.searching import SearchCancelledError
from stageline.studio.plans.what_if import with_devices, with_link_speed, with_memory


def test_the_best_way_is_that_of_sl_plan(planner: str) -> None:
    plan = sl.plan(small_profile(), small_cluster(), batch_size=8)
    found = compared(planner)
    best = found["ways"][0]
    assert found["has_best"]
    assert best["description"] == plan.chosen.description
    assert best["seconds"] == plan.chosen.seconds
    assert best["balance"] == list(plan.balance)
    assert best["verdict"] == ""


def test_other_ways_are_slower_or_do_not_fit(planner: str) -> None:
    best, *others = compared(planner)["ways"]
    fitting = [way for way in others if way["fits"]]
    too_large = [way for way in others if way["fits"] is False]
    assert fitting
    assert too_large
    assert all(way["seconds"] >= 0.999 * best["seconds"] for way in fitting)
    assert all("% slower: " in way["verdict"] for way in fitting)
    assert all(way["verdict"].startswith("does not fit: ") for way in too_large)
    assert all(way["peak_memory"] > 24 * 2**20 for way in too_large)


def test_no_way_is_listed_twice(planner: str) -> None:
    ways = [
        (way["description"], way["balance"], way["recompute"]) for way in compared(planner)["ways"]
    ]
    assert len(ways) == len({str(way) for way in ways})


def test_if_nothing_fits_all_ways_are_shown_with_what_would_fit(planner: str) -> None:
    found = compared(planner, memory="2MiB")
    assert not found["has_best"]
    assert found["message"].startswith("nothing fits in 2MiB; the closest is ")
    assert {way["fits"] for way in found["ways"]} == {False}


def test_the_best_can_be_saved_and_loaded(planner: str, tmp_path: Any) -> None:
    status, answer = posted(planner, "api/plans/save", question())
    assert status == 200
    (tmp_path / "plan.json").write_text(answer["result"]["file"])
    plan = sl.Plan.load(tmp_path / "plan.json")
    assert plan.chosen.description == compared(planner)["ways"][0]["description"]


def test_saving_says_why_there_is_no_plan(planner: str) -> None:
    _, answer = posted(planner, "api/plans/save", question(memory="2MiB"))
    assert answer["error"].startswith("nothing fits in 2MiB")


@pytest.mark.parametrize("name", ["gpt-1.3b", "gpt-13b"])
def test_an_example_is_a_profile_and_a_cluster(planner: str, name: str, tmp_path: Any) -> None:
    _, example = posted(planner, "api/plans/example", {"name": name})
    for kind in ("profile", "cluster"):
        (tmp_path / kind).write_text(example[kind])
    profile, cluster = sl.Profile.load(tmp_path / "profile"), sl.Cluster.load(tmp_path / "cluster")
    parameters = sum(layer.parameters for layer in profile.measurements[0].layers) / 2
    assert parameters == pytest.approx(float(name[4:-1]) * 1e9, rel=0.1)
    assert cluster.num_devices in (4, 32)


HOSTILE: dict[str, dict[str, Any]] = {
    "no profile": {"profile": ""},
    "a profile of another kind": {"profile": "[]"},
    "a deep profile": {"profile": "[" * 100_000},
    "infinite costs": {"profile": '{"names": ["a"], "measurements": [1e999]}'},
    "no cluster": {"cluster": "{}"},
    "a cluster that is markup": {"cluster": "<script>alert(1)</script>"},
    "a huge cluster": {"cluster": '{"num_devices": 1000000000000, "memory": "1GiB"}'},
    "an empty batch": {"batch_size": 0},
    "a huge batch": {"batch_size": 10**30},
    "a batch that is text": {"batch_size": "many"},
    "no devices": {"num_devices": 0},
    "a million devices": {"num_devices": 10**6},
    "devices that do not fill machines": {"cluster": "two machines", "num_devices": 6},
    "memory that is text": {"memory": "a lot"},
    "negative memory": {"memory": "-1GiB"},
    "links that stand still": {"link_speed": 0},
    "links that are no number": {"link_speed": float("nan")},
    "micro-batches above the batch": {"microbatch_size": 9},
    "an unknown optimizer": {"optimizer": "__import__('os')"},
    "an unknown field": {"path": "/etc/passwd"},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_request_that_makes_no_sense_is_refused_with_a_message(
    planner: str, fields: dict[str, Any]
) -> None:
    if fields.get("cluster") == "two machines":
        levels = (Level("machine", 4, 1e9), Level("site", 2, 1e9))
        fields = fields | {"cluster": as_text(Cluster(8, "1GiB", levels=levels))}
    started = time.monotonic()
    status, answer = posted(planner, "api/plans/compare", question(**fields))
    assert status == 422
    assert 10 < len(answer["error"]) < 500
    assert "Traceback" not in answer["error"]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b'{"a":' * 50_000])
def test_a_body_that_is_no_request_is_refused(planner: str, body: bytes) -> None:
    assert posted(planner, "api/plans/compare", body)[0] == 422


@pytest.mark.parametrize("name", ["profile", "cluster"])
def test_if_there_is_no_text_it_is_said_where_to_get_one(planner: str, name: str) -> None:
    _, answer = posted(planner, "api/plans/compare", question(**{name: "\n"}))
    assert answer["error"].startswith(f"there is no {name}: load an example, or what stageline")


def test_an_unknown_example_is_refused(planner: str) -> None:
    status, answer = posted(planner, "api/plans/example", {"name": "../../etc/passwd"})
    assert status == 422
    assert "the examples are gpt-1.3b, gpt-13b" in answer["error"]


def test_a_search_ends_when_the_page_closes_the_connection(
    planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def endless(_request: object, _schedules: object, progress: ReportProgress) -> None:
        try:
            while True:
                progress(1, "no end in sight")
                time.sleep(0.01)
        except SearchCancelledError:
            ended.set()
            raise

    monkeypatch.setattr(routes, "compared", endless)
    parts = urlsplit(planner)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"{parts.path}api/plans/compare", json.dumps(question()), headers)
    response = connection.getresponse()
    assert json.loads(response.readline()) == {"progress": "1 tried, no end in sight"}
    response.close()
    connection.close()
    assert ended.wait(10)


def test_more_devices_fill_machines_of_the_same_size() -> None:
    levels = (Level("machine", 4, 1e9), Level("site", 2, 1e8))
    cluster = Cluster(8, "1GiB", levels=levels)
    assert [level.size for level in with_devices(cluster, 16).levels] == [4, 4]
    assert [level.size for level in with_devices(cluster, 4).levels] == [4, 1]
    assert [level.size for level in with_devices(cluster, 3).levels] == [3, 1]
    with pytest.raises(PlanError, match=r"groups 'machine' have 4 members: .* such as 4"):
        with_devices(cluster, 6)


def test_devices_that_differ_are_repeated_and_keep_their_speed() -> None:
    cluster = Cluster(2, devices=(Device("1GiB", 1.0), Device("2GiB", 0.5)))
    more = with_memory(with_devices(cluster, 3), "4GiB")
    assert [device.speed for device in more.devices] == [1.0, 0.5, 1.0]
    assert {device.memory_bytes for device in more.devices} == {4 * 2**30}


def test_faster_links_have_the_same_latency() -> None:
    cluster = Cluster(2, "1GiB", levels=(Level("machine", 2, 1e9, latency=1e-5),))
    (level,) = with_link_speed(cluster, 2).levels
    assert (level.bandwidth, level.latency) == (2e9, 1e-5)
    with pytest.raises(PlanError, match="the cluster has no levels of links"):
        with_link_speed(Cluster(2, "1GiB"), 2)
