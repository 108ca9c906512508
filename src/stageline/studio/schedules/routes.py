"""The routes of the page of schedules."""

from __future__ import annotations

from starlette.routing import Route


def schedule_routes() -> list[Route]:
    """Return the routes of the page of schedules."""
    return []
