"""Build orders, and keep those that were shown lately."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from stageline.errors import ScheduleError
from stageline.schedules.build import build_schedule
from stageline.schedules.check import check
from stageline.schedules.schedule import Schedule
from stageline.studio.schedules.arrays import ActionArrays
from stageline.studio.schedules.fields import Move, ScheduleFields

MOST_KEPT = 1_500_000  # actions; each takes some 250 bytes


class OrderStore:
    """Orders by their fields. State: those that were used last, whose sizes are limited."""

    def __init__(self) -> None:
        self._orders: OrderedDict[str, ActionArrays] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, fields: ScheduleFields) -> ActionArrays:
        """Return an order that is kept, or build it. A search has to be run before."""
        with self._lock:
            if found := self._orders.get(fields.key):
                self._orders.move_to_end(fields.key)
                return found
        order = self._make(fields)
        self.put(fields, order)
        return order

    def put(self, fields: ScheduleFields, order: ActionArrays) -> None:
        """Keep an order, and drop those that were used longest ago if there are too many."""
        with self._lock:
            self._orders[fields.key] = order
            total = sum(each.num_actions for each in self._orders.values())
            while total > MOST_KEPT and len(self._orders) > 1:
                total -= self._orders.popitem(last=False)[1].num_actions

    def _make(self, fields: ScheduleFields) -> ActionArrays:
        if fields.moves:
            original = self.get(fields.model_copy(update={"moves": ()}))
            return edited(original.schedule, fields.moves)
        if fields.search is not None:
            raise ScheduleError("the result of this search is no longer kept: search again")
        return ActionArrays(build_schedule(fields.family, **fields.options))


def edited(schedule: Schedule, moves: Sequence[Move]) -> ActionArrays:
    """Return an order after its moves, with what the checker says against it."""
    if schedule.is_stream:
        raise ScheduleError("only a single mini-batch can be edited: set mini-batches to 1")
    rows = [list(row) for row in schedule.actions]
    for rank, source, target in moves:
        if rank >= len(rows) or max(source, target) >= len(rows[rank]):
            raise ScheduleError(
                f"position {max(source, target)} of rank {rank} does not exist: undo the edits"
            )
        rows[rank].insert(target, rows[rank].pop(source))
    moved = replace(schedule, actions=tuple(map(tuple, rows)), name=f"{schedule.name} edited")
    try:
        check(moved)
    except ScheduleError as error:
        return ActionArrays(moved, str(error))
    return ActionArrays(moved)
