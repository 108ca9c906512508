"""The routes of the page of runs."""

from __future__ import annotations

import json
from pathlib import Path
from time import time
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response
from starlette.routing import Route

from stageline.runs.read import read_run
from stageline.studio.requests import StudioRequest, post_route
from stageline.studio.runs.describe import described_curves, described_details, described_summary
from stageline.studio.runs.folder import RunsFolder, version_of

LONGEST_KEY = 100


class ListRequest(StudioRequest):
    """The version of the list that the page has."""

    version: str = ""


class RunRequest(StudioRequest):
    """A run, by the key that the list gives it."""

    key: Annotated[str, Field(max_length=LONGEST_KEY)]
    details: bool = False  # all that is known, and not only the curves


def run_routes(folder: Path) -> list[Route]:
    """Return the routes of the page of runs, for the runs in a folder."""
    runs = RunsFolder(folder.resolve())

    def listed(request: ListRequest) -> Response:
        """Answer without the runs if the page has them already."""
        version, found = runs.current()
        answer: dict[str, Any] = {"version": version, "now": time()}
        if version != request.version:
            answer["runs"] = [described_summary(key, run) for key, run in found.items()]
        return _response(answer)

    def read(request: RunRequest) -> Response:
        place = runs.find(request.key)
        version = version_of([place])  # of the files, or older ones: never newer than what is read
        run = read_run(place)
        details = described_details(run) if request.details else None
        curves = described_curves(run)
        return _response({"version": version, "curves": curves, "details": details})

    return [
        post_route("/api/runs/list", ListRequest, listed),
        post_route("/api/runs/read", RunRequest, read),
    ]


def _response(value: Any) -> Response:
    """Return JSON in ASCII: the name of a folder may have bytes that are not UTF-8."""
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")
