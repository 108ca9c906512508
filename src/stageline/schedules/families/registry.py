"""List all schedule families: the names that `build_schedule` takes, and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stageline.limits import MOST_STAGES, check_most, check_pipeline
from stageline.schedules.families.dualpipe_v import dualpipe_v
from stageline.schedules.families.gpipe import gpipe
from stageline.schedules.families.hanayo import hanayo
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.looped_bfs import looped_bfs
from stageline.schedules.families.naive import naive
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.families.pipedream import pipedream
from stageline.schedules.families.pipedream_2bw import pipedream_2bw
from stageline.schedules.families.v_half import v_half
from stageline.schedules.families.v_min import v_min
from stageline.schedules.families.zb_1p_2p import zb_1p, zb_2p, zbv_or_searched
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.schedule import Schedule


class ScheduleFamily(NamedTuple):
    """A function that builds schedules, with its summary, options and properties."""

    build: Callable[..., Schedule]
    summary: str
    options: tuple[str, ...] = ()
    chunks: int = 1  # stages per rank, unless chunks_per_rank is given
    is_synchronous: bool = True  # a mini-batch ends with a flush and one step
    is_filled_by_slots: bool = False  # built slot by slot, with at least 2p micro-batches

    def check_sizes(
        self, num_ranks: int, num_stages: int, num_microbatches: int, num_minibatches: int | None
    ) -> None:
        """Raise `ScheduleError` if a schedule of these sizes would not fit in memory."""
        check_most("num_ranks", num_ranks, MOST_STAGES)
        if num_minibatches is None:  # an asynchronous schedule has enough to repeat its period
            repeats = 3 * (num_ranks // num_microbatches) + 4
            num_minibatches = 1 if self.is_synchronous else repeats
        least = 2 * num_ranks if self.is_filled_by_slots else 1
        check_pipeline(num_stages, max(num_microbatches, least), num_minibatches)


SEARCHED = ("costs", "memory_limit", "time_budget", "seed")
CHUNKS = ("chunks_per_rank",)
FAMILIES = {
    "naive": ScheduleFamily(naive, "one micro-batch at a time, no pipelining"),
    "gpipe": ScheduleFamily(gpipe, "all forwards, then all backwards"),
    "1f1b": ScheduleFamily(one_f_one_b, "PipeDream-Flush: one forward, one backward"),
    "interleaved_1f1b": ScheduleFamily(
        interleaved_1f1b, "Megatron-LM: 1F1B over several chunks", (*CHUNKS, "group_size"), 2
    ),
    "looped_bfs": ScheduleFamily(looped_bfs, "breadth-first over several chunks", CHUNKS, 2),
    "zb_h1": ScheduleFamily(zb_h1, "zero bubble with the memory of 1F1B"),
    "zb_h2": ScheduleFamily(zb_h2, "zero bubble with twice that memory"),
    "zb_1p": ScheduleFamily(zb_1p, "zero bubble, searched for the costs, p activations", SEARCHED),
    "zb_2p": ScheduleFamily(zb_2p, "zero bubble, searched for the costs, 2p activations", SEARCHED),
    "zbv": ScheduleFamily(
        zbv_or_searched,
        "zero bubble in a V, searched if costs are given",
        SEARCHED,
        2,
        is_filled_by_slots=True,
    ),
    "v_half": ScheduleFamily(
        v_half, "a V with half the memory of 1F1B", chunks=2, is_filled_by_slots=True
    ),
    "v_min": ScheduleFamily(
        v_min, "a V with a third of the memory of 1F1B", chunks=2, is_filled_by_slots=True
    ),
    "dualpipe_v": ScheduleFamily(dualpipe_v, "DeepSeek's DualPipe, cut in half", chunks=2),
    "hanayo": ScheduleFamily(hanayo, "1F1B in waves", CHUNKS, 2),
    "pipedream": ScheduleFamily(
        pipedream,
        "1F1B without a flush, with weight stashing",
        ("vertical_sync", "replicas"),
        is_synchronous=False,
    ),
    "pipedream_2bw": ScheduleFamily(
        pipedream_2bw,
        "1F1B without a flush, two weight versions",
        ("replicas",),
        is_synchronous=False,
    ),
}
