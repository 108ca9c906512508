"""The routes of the page of plans."""

from __future__ import annotations

from starlette.routing import Route


def plan_routes() -> list[Route]:
    """Return the routes of the page of plans."""
    return []
