"""The routes of the page of plans."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.routing import Route

from stageline.arguments import shown
from stageline.errors import PlanError
from stageline.planning.cluster.cluster import Cluster
from stageline.planning.profiling.profile_result import Profile
from stageline.studio.plans.comparison import ComparisonRequest, compared, planned
from stageline.studio.plans.examples import EXAMPLES
from stageline.studio.plans.searching import streamed
from stageline.studio.requests import StudioRequest, post_route


class ExampleRequest(StudioRequest):
    """The name of a built-in example; '' to list all."""

    name: str = ""


def plan_routes() -> list[Route]:
    """Return the routes of the page of plans."""
    return [
        post_route("/api/plans/example", ExampleRequest, _example),
        post_route("/api/plans/compare", ComparisonRequest, _compare),
        post_route("/api/plans/save", ComparisonRequest, _save),
    ]


def _example(request: ExampleRequest) -> Any:
    if not request.name:
        return [{"name": name, "title": each.title} for name, each in EXAMPLES.items()]
    if request.name not in EXAMPLES:
        raise PlanError(
            f"there is no example {shown(request.name)}: the examples are {', '.join(EXAMPLES)}"
        )
    example = EXAMPLES[request.name]
    return {
        "profile": TypeAdapter(Profile).dump_json(example.shape.profile()).decode(),
        "cluster": TypeAdapter(Cluster).dump_json(example.cluster, indent=1).decode(),
        "batch_size": example.batch_size,
    }


def _compare(request: ComparisonRequest) -> Response:
    return streamed(partial(compared, request.to_plan_request(), request.schedules))


def _save(request: ComparisonRequest) -> Response:
    return streamed(partial(planned, request.to_plan_request(), request.schedules))
