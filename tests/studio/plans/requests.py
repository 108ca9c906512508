"""Requests for plans as the page sends them, with a small profile."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter
from tests.planning.small_layers import cluster_of, profile_of

from stageline.planning.cluster.cluster import Cluster, Level
from stageline.planning.profiling.profile_result import Profile

MIB = 2**20


def as_text(value: object) -> str:
    return TypeAdapter(type(value)).dump_json(value).decode()


def small_profile() -> Profile:
    """Eight layers of equal time, each with 1 MiB of activations, parameters and output."""
    return profile_of([1e-3] * 8, activation=MIB, parameters=MIB, message=MIB)


def small_cluster(memory: str = "24MiB") -> Cluster:
    return cluster_of(4, memory, levels=(Level("machine", 4, bandwidth=10e9),))


def question(**fields: Any) -> dict[str, Any]:
    given = {"profile": as_text(small_profile()), "cluster": as_text(small_cluster())}
    return given | {"batch_size": 8} | fields


def posted(studio: str, path: str, body: Any, timeout: float = 15.0) -> tuple[int, Any]:
    """Post JSON, or bytes as they are; return the status and the last line of the answer."""
    parts = urlsplit(studio)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"{parts.path}{path}", body=text, headers=headers)
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()
    return response.status, json.loads(lines[-1])


def compared(studio: str, **fields: Any) -> Any:
    """Return the result of a comparison."""
    status, answer = posted(studio, "api/plans/compare", question(**fields))
    assert status == 200
    return answer["result"]
