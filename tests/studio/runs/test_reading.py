"""Runs as the page asks for them: by names of the list, and nothing outside of the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runs.folders import line, write_run
from tests.studio.plans.requests import posted
from tests.studio.sharing import running_studio

from stageline.runs.records import METRICS

SECRET = "the secret outside"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, and a run beside it that must not be read."""
    outer = tmp_path_factory.mktemp("outer")
    write_run(outer / "outside", events=(("failed", 1, SECRET),))
    write_run(outer / "runs" / "inside")
    (outer / "runs" / "link").symlink_to(outer / "outside")
    return outer / "runs"


@pytest.fixture(scope="module")
def reader(place: Path) -> Iterator[str]:
    with running_studio(place) as address:
        yield address


def listed(studio: str, version: str = "") -> Any:
    status, answer = posted(studio, "api/runs/list", {"version": version})
    assert status == 200
    return answer


def read(studio: str, key: str) -> Any:
    status, answer = posted(studio, "api/runs/read", {"key": key, "details": True})
    assert status == 200
    return answer


def test_a_run_is_read_by_its_key(reader: str) -> None:
    assert [run["key"] for run in listed(reader)["runs"]] == ["inside"]
    found = read(reader, "inside")
    assert found["curves"]["step"] == list(range(10, 101, 10))
    assert found["details"]["facts"]["schedule"] == "1f1b"
    assert posted(reader, "api/runs/read", {"key": "inside"})[1]["details"] is None


def test_the_list_is_sent_again_only_if_a_file_has_changed(reader: str, place: Path) -> None:
    before = listed(reader)
    assert "runs" not in listed(reader, before["version"])
    with (place / "inside" / METRICS).open("a") as file:
        file.write(json.dumps(line(110)) + "\n")
    after = listed(reader, before["version"])
    assert after["runs"][0]["step"] == 110
    assert after["runs"][0]["version"] != before["runs"][0]["version"]


@pytest.mark.parametrize(
    "key",
    [
        *("", "..", "../outside", "link", "./inside", "inside/", "inside/../inside", "Inside"),
        *("/etc", "/etc/passwd", "inside\0", "in\nside", "<b>inside</b>", "~", "x" * 5000),
        *("../outside/", "%2e%2e/outside", "..\\outside", "inside/run.json"),
    ],
)
def test_what_is_not_in_the_list_is_refused(reader: str, key: str) -> None:
    status, answer = posted(reader, "api/runs/read", {"key": key, "details": True})
    assert status == 422
    assert answer["error"].startswith(("there is no run", "key is"))
    assert SECRET not in json.dumps(answer)
    assert len(answer["error"]) < 300


@pytest.mark.parametrize("body", [b"", b"[]", b'{"key": 3}', b'{"key": null}', b'{"path": "/"}'])
def test_a_request_without_a_key_is_refused(reader: str, body: bytes) -> None:
    assert posted(reader, "api/runs/read", body)[0] == 422


def test_a_run_that_becomes_a_link_is_not_followed(reader: str, place: Path) -> None:
    write_run(place / "swapped")
    read(reader, "swapped")
    (place / "swapped").rename(place.parent / "moved")
    (place / "swapped").symlink_to(place.parent / "outside")
    assert posted(reader, "api/runs/read", {"key": "swapped"})[0] == 422
    (place / "swapped").unlink()


def test_files_of_a_run_that_are_links_are_not_read(reader: str, place: Path) -> None:
    run = write_run(place / "linked")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(place.parent / "outside" / "events.jsonl")
    found = read(reader, "linked")
    assert SECRET not in json.dumps(found)
    assert found["details"]["notes"] == ["events.jsonl was not read: is a link"]


@pytest.mark.parametrize(
    "name",
    [
        b"a\nb",
        b"<img src=x onerror=alert(1)>",
        b"\xff\xfe not UTF-8",
        b"r" * 255,
        b"..hidden, with commas",
        "ラン 1".encode(),
    ],
)
def test_any_name_can_be_listed_and_read(reader: str, place: Path, name: bytes) -> None:
    write_run(place / os.fsdecode(name))
    keys = {run["key"] for run in listed(reader)["runs"]}
    (place / os.fsdecode(name)).rename(place / "gone")
    new = (keys - {run["key"] for run in listed(reader)["runs"]}).pop()
    (place / "gone").rename(place / os.fsdecode(name))
    assert read(reader, new)["curves"]["step"]
    assert len(new) <= 100
    assert "," not in new


def test_a_folder_that_is_a_run_itself_is_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with running_studio(run) as studio:
        assert [(each["key"], each["name"]) for each in listed(studio)["runs"]] == [(".", "run")]
        assert read(studio, ".")["details"]["facts"]["ranks"] == "2"


HOSTILE = {
    "deep": "[" * 100_000,
    "infinite": json.dumps({"started": 1e308, "configuration": {"num_ranks": 1e999}}),
    "huge": json.dumps({"started": 1, "configuration": {"num_ranks": 10**9}}),
    "of another kind": "[]",
    "not text": "\0\0\0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_a_note_and_no_more(reader: str, place: Path, name: str) -> None:
    run = write_run(place / f"hostile-{name.replace(' ', '-')}")
    for file in ("run.json", "timeline.json"):
        (run / file).write_text(HOSTILE[name])
    (run / "metrics.jsonl").write_text(f"{HOSTILE[name]}\n{json.dumps(line(1))}\n")
    (run / "events.jsonl").write_text(f"{HOSTILE[name]}\n")
    found = read(reader, run.name)
    assert found["curves"]["step"][-1] == 1
    assert found["details"]["notes"] or name == "huge"


def test_a_folder_that_was_removed_is_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with running_studio(tmp_path / "runs") as studio:
        (tmp_path / "runs").rmdir()
        status, answer = posted(studio, "api/runs/list", {})
    assert status == 422
    assert answer["error"].startswith("the folder of runs cannot be read: ")
