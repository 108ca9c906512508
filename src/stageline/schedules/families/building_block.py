"""Schedules from a building block (arXiv 2405.15362): one micro-batch's slots, repeated every six.

With two chunks a rank has six things to do for each micro-batch: F, I and W on both. When no two of
its slots are equal modulo six, the block can follow itself every six slots for ever. A rank's order
is that of the slots; when it runs, everything starts as early as that order allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stageline.schedules.action import Action, Kind
from stageline.schedules.families.fill_waits import fill_waits
from stageline.schedules.placement import wave
from stageline.schedules.schedule import Schedule

PERIOD = 6
Slots = tuple[int, int, int, int]  # of a rank's F0, F1, I1 and I0, for micro-batch 0


def building_block(
    num_ranks: int, num_microbatches: int, slots_of: Callable[[int], Slots]
) -> Schedule:
    """W take the slots that `slots_of` leaves free, or others in which the rank would wait."""
    rows = [
        _row(rank, 2 * num_ranks - 1 - rank, slots_of(rank), num_microbatches)
        for rank in range(num_ranks)
    ]
    return Schedule.of(fill_waits(rows, 2 * num_ranks), wave(num_ranks))


def in_slot_order(actions: Iterable[tuple[int, Action]]) -> list[Action]:
    return [action for _, action in sorted(actions)]


def _row(first: int, second: int, slots: Slots, num_microbatches: int) -> list[Action]:
    stages = (first, second, second, first, second, first)
    kinds = (Kind.F, Kind.F, Kind.I, Kind.I, Kind.W, Kind.W)
    block = list(zip(slots + _weight_slots(slots), stages, kinds, strict=True))
    return in_slot_order(
        (slot + PERIOD * i, Action(stage, kind, i))
        for i in range(num_microbatches)
        for slot, stage, kind in block
    )


def _weight_slots(slots: Slots) -> tuple[int, int]:
    """W1 takes the first free slot after I1, and W0 the first after I0 that is still free."""
    *_, input_grad1, input_grad0 = slots
    taken = {slot % PERIOD for slot in slots}
    weight_grad1 = _first_free(input_grad1, taken)
    return weight_grad1, _first_free(input_grad0, taken | {weight_grad1 % PERIOD})


def _first_free(after: int, taken: set[int]) -> int:
    return next(slot for slot in range(after + 1, after + PERIOD) if slot % PERIOD not in taken)
