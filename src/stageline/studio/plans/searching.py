"""Answer with lines of JSON while a search runs: its progress, then its result.

The search runs in a thread. It ends early if the page closes the connection, which is how the
page cancels it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

from starlette.responses import StreamingResponse

from stageline.errors import StagelineError
from stageline.planning.search.search import ReportProgress

SECONDS_BETWEEN_LINES = 0.1


class SearchCancelledError(Exception):
    """Nobody waits for the search any more."""


def streamed(search: Callable[[ReportProgress], Any]) -> StreamingResponse:
    """Return a response with lines of progress, and a last one with the result or the error."""
    return StreamingResponse(_lines(search), media_type="application/x-ndjson")


async def _lines(search: Callable[[ReportProgress], Any]) -> AsyncIterator[str]:
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
    cancelled = threading.Event()
    running = loop.run_in_executor(
        None,
        _run,
        search,
        cancelled,
        lambda line: loop.call_soon_threadsafe(messages.put_nowait, line),
    )
    try:
        is_last = False
        while not is_last:
            message = await messages.get()
            is_last = "progress" not in message
            yield json.dumps(message) + "\n"
        await running
    finally:
        cancelled.set()


def _run(
    search: Callable[[ReportProgress], Any],
    cancelled: threading.Event,
    send: Callable[[dict[str, Any]], Any],
) -> None:
    sent = -SECONDS_BETWEEN_LINES

    def progress(count: int, words: str) -> None:
        nonlocal sent
        if cancelled.is_set():
            raise SearchCancelledError
        if monotonic() - sent >= SECONDS_BETWEEN_LINES:
            sent = monotonic()
            send({"progress": f"{count} tried, {words}" if count else words})

    try:
        send({"result": search(progress)})
    except SearchCancelledError:
        pass
    except StagelineError as error:
        send({"error": str(error)})
    except Exception as error:
        send({"error": f"the search failed: {error!r}"})
        raise
