"""Search for an order, and answer with lines of JSON while it runs.

{"done": 0.25}                          the share of the work that is done, ten times a second
{"message": "makespan 27, …"}           at the end; the order is kept for the page's next request
{"error": "memory_limit is …"}          instead, if it could not be searched for
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from stageline.errors import StagelineError
from stageline.report.summary import measure_phrases
from stageline.schedules.search.search import watched_search
from stageline.simulation.simulate import simulate
from stageline.studio.schedules.arrays import ActionArrays
from stageline.studio.schedules.fields import ScheduleFields, SearchFields
from stageline.studio.schedules.orders import OrderStore

REPORT_SECONDS = 0.1


class SearchAbandonedError(Exception):
    """Nobody waits for the result any more."""


class WatchedSearch:
    """A search in a thread of its own. State: the lines to send, and whether to give up."""

    def __init__(
        self, orders: OrderStore, fields: SearchFields, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.orders, self.fields, self.loop = orders, fields, loop
        self.lines: asyncio.Queue[dict[str, float | str]] = asyncio.Queue()
        self.is_abandoned = threading.Event()
        self.reported = time.monotonic()

    def run(self) -> None:
        """Search; the last line is the result, or an error."""
        try:
            self._send({"message": self._find()})
        except StagelineError as error:
            self._send({"error": str(error)})
        except SearchAbandonedError:
            pass

    def _find(self) -> str:
        fields, costs = self.fields, self.fields.stage_costs
        schedule = watched_search(
            self._report,
            fields.num_ranks,
            fields.num_microbatches,
            costs,
            fields.memory_limit,
            None,
            fields.placement,
            fields.time_budget,
            fields.seed,
        )
        self.orders.put(shown_search(fields), ActionArrays(schedule))
        return ", ".join(measure_phrases(simulate(schedule, costs)))

    def _report(self, done: float) -> None:
        if self.is_abandoned.is_set():
            raise SearchAbandonedError
        now = time.monotonic()
        if now - self.reported >= REPORT_SECONDS:
            self.reported = now
            self._send({"done": done})

    def _send(self, line: dict[str, float | str]) -> None:
        self.loop.call_soon_threadsafe(self.lines.put_nowait, line)


async def search_lines(orders: OrderStore, fields: SearchFields) -> AsyncIterator[str]:
    """Yield the lines of a search; give it up if no more lines are asked for."""
    loop = asyncio.get_running_loop()
    search = WatchedSearch(orders, fields, loop)
    loop.run_in_executor(None, search.run)
    try:
        while True:
            line = await search.lines.get()
            yield json.dumps(line) + "\n"
            if "done" not in line:
                break
    finally:
        search.is_abandoned.set()


def search_response(orders: OrderStore, fields: SearchFields) -> Response:
    """Return the lines of a search."""
    return StreamingResponse(search_lines(orders, fields), media_type="application/x-ndjson")


def shown_search(fields: SearchFields) -> ScheduleFields:
    """Return the fields with which the page asks for the result of a search."""
    return ScheduleFields(
        search=fields, num_ranks=fields.num_ranks, num_microbatches=fields.num_microbatches
    )
