"""The routes of the page of schedules."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from stageline.schedules.families.registry import FAMILIES
from stageline.studio.requests import StudioRequest, post_route
from stageline.studio.schedules.fields import (
    MOST_SCHEDULES,
    SEARCHED_FAMILIES,
    MemoryLimit,
    ScheduleFields,
    SearchFields,
)
from stageline.studio.schedules.orders import OrderStore
from stageline.studio.schedules.picture import pictures
from stageline.studio.schedules.save import SaveRequest, saved
from stageline.studio.schedules.search import search_response


class PicturesRequest(StudioRequest):
    """The schedules that are shown above each other, and their costs."""

    schedules: tuple[ScheduleFields, ...] = Field(max_length=MOST_SCHEDULES)
    costs: dict[str, Any] = Field(default={})
    memory_limit: MemoryLimit = None


def schedule_routes() -> list[BaseRoute]:
    """Return the routes of the page of schedules."""
    orders = OrderStore()

    def show(fields: PicturesRequest) -> Response:
        found = pictures(orders, fields.schedules, fields.costs, fields.memory_limit)
        return Response(found, media_type="application/octet-stream")

    return [
        Route("/api/schedules/families", _families),
        post_route("/api/schedules/pictures", PicturesRequest, show),
        post_route("/api/schedules/save", SaveRequest, lambda fields: saved(orders, fields)),
        post_route(
            "/api/schedules/search", SearchFields, lambda fields: search_response(orders, fields)
        ),
    ]


def _families(_: Request) -> Response:
    return JSONResponse(
        [
            {"name": name, "summary": family.summary}
            for name, family in FAMILIES.items()
            if name not in SEARCHED_FAMILIES
        ]
    )
