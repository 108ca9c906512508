"""Files and the line of Python that make the same schedule."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from pydantic import Field
from starlette.responses import Response

from stageline.costs import PER_STAGE, Costs, Link
from stageline.errors import ScheduleError
from stageline.report.palette import num_chunks
from stageline.report.perfetto import trace
from stageline.report.svg.drawing import svg
from stageline.schedules import csv
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate
from stageline.studio.requests import StudioRequest
from stageline.studio.schedules.fields import ScheduleFields, stage_costs
from stageline.studio.schedules.orders import OrderStore

TYPES = {"svg": "image/svg+xml", "csv": "text/csv", "json": "application/json", "py": "text/plain"}
MOST_WRITTEN = 2000  # actions in a line of Python; more are read from the CSV file


class SaveRequest(StudioRequest):
    """A schedule to be saved in a format."""

    schedule: ScheduleFields
    costs: dict[str, Any] = Field(default={})
    suffix: Literal["svg", "csv", "json", "py"]


def saved(orders: OrderStore, fields: SaveRequest) -> Response:
    """Return the file that was asked for."""
    order = orders.get(fields.schedule)
    if order.verdict and fields.suffix != "csv":
        raise ScheduleError(f"only CSV can hold an order that does not complete: {order.verdict}")
    schedule = order.schedule
    name = file_name(schedule)
    costs = stage_costs(fields.costs, schedule.num_ranks, num_chunks(schedule.placement))
    if fields.suffix == "csv":
        text = csv.render(schedule.actions)
    elif fields.suffix == "py":
        text = python_line(fields.schedule, schedule, costs)
    else:
        timeline = simulate(schedule, costs)
        text = svg(timeline) if fields.suffix == "svg" else trace(timeline)
    attachment = f'attachment; filename="{name}.{fields.suffix}"'
    headers = {"Content-Disposition": attachment}
    return Response(text, media_type=TYPES[fields.suffix], headers=headers)


def file_name(schedule: Schedule) -> str:
    """Return the name of a schedule's files, without a suffix."""
    return schedule.name.replace(" ", "-")


def python_line(fields: ScheduleFields, schedule: Schedule, costs: Costs) -> str:
    """Return a line of Python that makes the timeline of a schedule.

    >>> fields = ScheduleFields(family="gpipe", num_ranks=2, num_microbatches=2)
    >>> print(python_line(fields, Schedule.from_text("0F0 0B0"), Costs(forward=1.5)))
    import stageline as sl; timeline = sl.simulate(sl.build_schedule("gpipe", num_ranks=2, \
num_microbatches=2), sl.Costs(forward=1.5))
    """
    given = costs_in_python(costs)
    return (
        f"import stageline as sl; timeline = sl.simulate({_schedule_in_python(fields, schedule)}"
        f"{', ' + given if given else ''})"
    )


def costs_in_python(costs: Costs) -> str:
    """Return the call that makes costs; '' if they are those by default.

    >>> costs_in_python(Costs(forward=[1, 2], links=Link(latency=0.5)))
    'sl.Costs(forward=[1.0, 2.0], links=sl.Link(latency=0.5))'
    """
    usual = Costs(activation=costs.activation)  # which is also what is retained
    given = [
        f"{name}={_value(getattr(costs, name))}"
        for name in PER_STAGE
        if getattr(costs, name) != getattr(usual if name == "retained" else Costs(), name)
    ]
    if isinstance(costs.links, Link) and costs.links != Link():
        given.append(f"links={_link(costs.links)}")
    return f"sl.Costs({', '.join(given)})" if given else ""


def _value(value: float | tuple[float, ...]) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _link(link: Link) -> str:
    bandwidth = "" if math.isinf(link.bandwidth) else f"bandwidth={link.bandwidth!r}"
    parts = [f"latency={link.latency!r}" if link.latency else "", bandwidth]
    return f"sl.Link({', '.join(filter(None, parts))})"


def _schedule_in_python(fields: ScheduleFields, schedule: Schedule) -> str:
    if fields.moves:
        if sum(map(len, schedule.actions)) > MOST_WRITTEN:
            return f"sl.Schedule.from_csv({json.dumps(file_name(schedule) + '.csv')})"
        rows = ", ".join(json.dumps(" ".join(map(str, row))) for row in schedule.actions)
        return f"sl.Schedule.from_text({rows})"
    if fields.search is None:
        options = "".join(f", {name}={value!r}" for name, value in fields.options.items())
        return f"sl.build_schedule({json.dumps(fields.family)}{options})"
    search = fields.search
    parts = [str(search.num_ranks), str(search.num_microbatches)]
    if given := costs_in_python(search.stage_costs):
        parts.append(f"costs={given}")
    if search.memory_limit is not None:
        parts.append(f"memory_limit={search.memory_limit!r}")
    if search.placement != "straight":
        parts.append(f"placement={json.dumps(search.placement)}")
    parts += [f"time_budget={search.time_budget!r}", f"seed={search.seed}"]
    return f"sl.search_schedule({', '.join(parts)})"
