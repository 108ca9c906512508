"""JSON requests of the pages: read, validated, answered; errors as messages for the user."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stageline.arguments import shown
from stageline.errors import ReportError, StagelineError
from stageline.limits import MOST_FILE_BYTES
from stageline.units import format_bytes

UNUSABLE = 422  # the status of a request that is understood, but cannot be answered


class StudioRequest(BaseModel):
    """The fields of a request; subclasses name them. Other fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


RequestT = TypeVar("RequestT", bound=StudioRequest)
Work = Callable[[RequestT], Any]


def post_route(path: str, kind: type[RequestT], work: Work[RequestT]) -> Route:
    """Return a route that answers JSON of this kind with the result of `work`.

    `work` runs in a thread of its own. It returns a `Response`, or anything that JSON can hold.
    """

    async def answer(request: Request) -> Response:
        try:
            fields = kind.model_validate(await read_json(request))
            result = await run_in_threadpool(work, fields)
        except (StagelineError, ValidationError) as error:
            return error_response(error)
        return result if isinstance(result, Response) else JSONResponse(result)

    return Route(path, answer, methods=["POST"])


def error_response(error: StagelineError | ValidationError) -> Response:
    """Return the message of an error as JSON, in the form that the pages show."""
    return JSONResponse({"error": message_of(error)}, status_code=UNUSABLE)


def message_of(error: StagelineError | ValidationError) -> str:
    """Return the text of an error; that of a wrong field names the field and what was given."""
    if isinstance(error, StagelineError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the request"
    if first["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {shown(first['input'])}: {first['msg'].lower()}"


async def read_json(request: Request) -> Any:
    """Return the JSON in the body of a request; raise `ReportError` if it is none, or too long."""
    parts, size = [], 0
    async for part in _body(request):
        size += len(part)
        if size > MOST_FILE_BYTES:
            raise ReportError(f"the request has more than {format_bytes(MOST_FILE_BYTES)}")
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as problem:
        raise ReportError(f"the request is not JSON: {problem}") from None


def _body(request: Request) -> AsyncIterator[bytes]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise ReportError("the request is not of type application/json")
    return request.stream()
