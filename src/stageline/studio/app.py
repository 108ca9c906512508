"""The pages of the studio, and the requests that they make."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from stageline.studio.access import AccessGuard
from stageline.studio.plans.routes import plan_routes
from stageline.studio.runs.routes import run_routes
from stageline.studio.schedules.routes import schedule_routes

PAGES = ("schedules", "plans", "runs")
STATIC = Path(str(resources.files("stageline.studio"))) / "static"


def create_app(token: str, runs_folder: Path) -> ASGIApp:
    """Return the studio; all of its addresses begin with the token."""
    routes: list[BaseRoute] = [
        Route("/", _first_page),
        *(_page_route(name) for name in PAGES),
        *schedule_routes(),
        *plan_routes(),
        *run_routes(runs_folder),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return AccessGuard(Starlette(routes=routes), token)


def _first_page(request: Request) -> Response:
    return RedirectResponse(f"{request.scope['root_path']}/{PAGES[0]}")


def _page_route(name: str) -> Route:
    return Route(f"/{name}", lambda _: FileResponse(STATIC / name / "page.html"))
