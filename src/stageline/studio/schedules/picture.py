"""All that the page draws: a header in JSON, then arrays of numbers, little-endian.

    length of the header (4 bytes) │ header, padded with spaces to 8 bytes │ array │ array │ …

The header gives each array's type, offset behind the header, and length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from stageline.errors import ScheduleError, StagelineError
from stageline.report.idle import span_bubble, step_bubble
from stageline.report.palette import chunks, ink, num_chunks, shade
from stageline.schedules.lower_bounds import lower_bounds, reached_or_bound
from stageline.schedules.search.memory_limits import activation_limits
from stageline.studio.schedules.arrays import KINDS
from stageline.studio.schedules.fields import MemoryLimit, ScheduleFields, stage_costs
from stageline.studio.schedules.orders import OrderStore
from stageline.studio.schedules.timing import HeldMemory, TimedActions, held_memory, timed

ALIGNMENT = 8  # bytes: JavaScript refuses a Float64Array at another place
TYPES = {"starts": "<f8", "ends": "<f8", "during": "<f4", "after": "<f4", "waitsFor": "<i4"}
TYPES |= {"microbatches": "<i4", "stages": "<u2", "kindOf": "u1", "neverRun": "u1"}


def pictures(
    orders: OrderStore,
    schedules: Sequence[ScheduleFields],
    costs: dict[str, Any],
    memory_limit: MemoryLimit,
) -> bytes:
    """Return all schedules with their times; one that cannot be made has a message instead.

    If all have the same message, it is raised: the page then keeps what it shows.
    """
    headers: list[dict[str, Any]] = []
    parts: list[bytes] = []
    offset = 0
    for fields in schedules:
        try:
            header, arrays = _picture(orders, fields, costs, memory_limit)
        except StagelineError as error:
            headers.append({"name": fields.family, "error": str(error)})
            continue
        places: dict[str, list[str | int]] = {}
        for name, type_name in TYPES.items():
            data = arrays[name].astype(type_name).tobytes()
            places[name] = [type_name.lstrip("<"), offset, len(arrays[name])]
            parts.append(data + bytes(-len(data) % ALIGNMENT))
            offset += len(parts[-1])
        headers.append({**header, "arrays": places})
    messages = {header.get("error") for header in headers}
    if len(messages) == 1 and (message := messages.pop()):
        raise ScheduleError(message)
    text = json.dumps(headers, allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % ALIGNMENT)
    return b"".join([len(text).to_bytes(4, "little"), text, *parts])


def _picture(
    orders: OrderStore, fields: ScheduleFields, costs: dict[str, Any], memory_limit: MemoryLimit
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    order = orders.get(fields)
    placement = order.schedule.placement
    work = timed(order, stage_costs(costs, order.schedule.num_ranks, num_chunks(placement)))
    memory = held_memory(work)
    actions = work.actions
    arrays: dict[str, npt.NDArray[Any]] = {
        "starts": work.starts,
        "ends": work.ends,
        "during": memory.during,
        "after": memory.after,
        "waitsFor": actions.waits_for,
        "microbatches": actions.microbatches,
        "stages": actions.stages,
        "kindOf": actions.kinds,
        "neverRun": work.never_run,
    }
    header = {
        "name": actions.schedule.name,
        "verdict": order.verdict,
        "isStream": order.schedule.is_stream,
        "placement": placement,
        "chunks": chunks(placement),
        "rowStarts": actions.row_starts.tolist(),
        "kinds": [kind.value for kind in KINDS],
        "colours": _colours(num_chunks(placement)),
        "numMicrobatches": order.schedule.num_microbatches,
        **_measures(work, memory),
        "limits": _limits(memory_limit, work),
    }
    return header, arrays


def _measures(work: TimedActions, memory: HeldMemory) -> dict[str, Any]:
    """Return what `Timeline` measures; nothing about the times of an order with a deadlock."""
    found: dict[str, Any] = {"end": work.makespan, "peakMemory": memory.peaks}
    found |= {"peakActivations": memory.peak_activations, "busy": work.busy}
    found["heldAtStart"] = work.costs.static(work.actions.schedule.placement)
    if work.never_run.any():
        return found
    schedule = work.actions.schedule
    bounds = lower_bounds(
        schedule.placement, schedule.total_microbatches, work.costs, memory.peak_activations
    )
    return found | {
        "makespan": work.makespan,
        "stepBubble": step_bubble(work.busy, work.makespan),
        "spanBubble": span_bubble(work.busy, work.rank_spans),
        "rankSpans": work.rank_spans,
        "lowerBound": reached_or_bound(bounds.makespan, work.makespan),
    }


def _limits(memory_limit: MemoryLimit, work: TimedActions) -> list[float] | None:
    """Return the limit on each rank's memory, weights included; None if there is none."""
    placement = work.actions.schedule.placement
    limits = activation_limits(memory_limit, placement, work.costs)
    static = work.costs.static(placement)
    both = [limit + always for limit, always in zip(limits, static, strict=True)]
    return None if math.inf in both else both


def _colours(total: int) -> list[list[tuple[str, str]]]:
    """Return for each kind and chunk the colour of an action, and that of its letters."""
    shades = ([shade(kind, chunk, total) for chunk in range(total)] for kind in KINDS)
    return [[(colour, ink(colour)) for colour in row] for row in shades]
