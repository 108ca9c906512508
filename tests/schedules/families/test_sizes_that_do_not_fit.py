"""Sizes that a family does not support, and the advice in its error."""

import re

import pytest

from stageline.errors import ScheduleError
from stageline.schedules.families.dualpipe_v import dualpipe_v
from stageline.schedules.families.hanayo import hanayo
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.one_f_one_b import one_f_one_b


def says(message: str) -> str:
    return f"^{re.escape(message)}$"


def test_dualpipe_v_with_too_few_micro_batches() -> None:
    message = (
        "num_microbatches is 6, but 'dualpipe_v' on 4 ranks needs at least 8: "
        "use num_microbatches=8, or 'zbv'"
    )
    with pytest.raises(ScheduleError, match=says(message)):
        dualpipe_v(4, 6)


@pytest.mark.parametrize(
    ("group_size", "nearest"), [(3, "5"), (4, "5"), (7, "6 or 10"), (11, "10")]
)
def test_interleaving_with_a_group_that_is_too_short(group_size: int, nearest: str) -> None:
    message = (
        f"group_size is {group_size}, but 'interleaved_1f1b' on 4 ranks with 10 micro-batches "
        f"needs groups of at least 4, including the last: use {nearest}"
    )
    with pytest.raises(ScheduleError, match=says(message)):
        interleaved_1f1b(4, 10, chunks_per_rank=2, group_size=group_size)


@pytest.mark.parametrize(("chunks", "nearest"), [(1, "2"), (3, "2 or 4")])
def test_hanayo_with_half_a_wave(chunks: int, nearest: str) -> None:
    message = f"chunks_per_rank is {chunks}, but 'hanayo' needs two for each wave: use {nearest}"
    with pytest.raises(ScheduleError, match=says(message)):
        hanayo(4, 8, chunks_per_rank=chunks)


@pytest.mark.parametrize(
    ("p", "m", "size"), [(4, 8, 4), (4, 9, 5), (4, 6, 6), (4, 7, 7), (4, 3, 3), (3, 10, 5)]
)
def test_interleaving_groups_as_short_as_the_ranks_allow(p: int, m: int, size: int) -> None:
    assert interleaved_1f1b(p, m) == interleaved_1f1b(p, m, group_size=size)


def test_interleaving_one_chunk_is_1f1b() -> None:
    assert interleaved_1f1b(4, 8, chunks_per_rank=1) == one_f_one_b(4, 8)
