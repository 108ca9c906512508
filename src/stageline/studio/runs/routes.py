"""The routes of the page of runs."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import JSONResponse
from starlette.routing import Route


def run_routes(folder: Path) -> list[Route]:
    """Return the routes of the page of runs, for the runs in a folder."""
    return [Route("/api/runs", lambda _: JSONResponse({"folder": folder.name}))]
