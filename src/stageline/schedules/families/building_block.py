"""Build schedules from the slots of one micro-batch, repeated every six (arXiv 2405.15362).

With two chunks a rank has six actions for each micro-batch: F, I and W on both. If no two of their
slots are equal modulo six, this building block can be repeated every six slots without conflict.
The slots determine only the order of a rank's actions; each runs as early as that order allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stageline.schedules.action import Action, Kind
from stageline.schedules.families.fill_waits import fill_waits
from stageline.schedules.placement import wave
from stageline.schedules.schedule import Schedule

PERIOD = 6
Slots = tuple[int, int, int, int]  # of F0, F1, I1 and I0 of micro-batch 0; 0, 1 are chunks


def building_block(
    num_ranks: int, num_microbatches: int, slots_of: Callable[[int], Slots]
) -> Schedule:
    """Return the schedule; W take free slots, or slots in which the rank would otherwise wait."""
    rows = [
        _row(rank, 2 * num_ranks - 1 - rank, slots_of(rank), num_microbatches)
        for rank in range(num_ranks)
    ]
    return Schedule.of(fill_waits(rows, 2 * num_ranks), wave(num_ranks))


def in_slot_order(actions: Iterable[tuple[int, Action]]) -> list[Action]:
    """Return actions sorted by slot."""
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
    """Return the slots of W1, the first free one after I1, and of W0, the next one after I0."""
    *_, input_grad1, input_grad0 = slots
    taken = {slot % PERIOD for slot in slots}
    weight_grad1 = _first_free(input_grad1, taken)
    return weight_grad1, _first_free(input_grad0, taken | {weight_grad1 % PERIOD})


def _first_free(after: int, taken: set[int]) -> int:
    return next(slot for slot in range(after + 1, after + PERIOD) if slot % PERIOD not in taken)
