"""Properties of every family: complete, free of deadlocks, and as drawn in its docstring."""

import re
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.report.spans import Span
from stageline.schedules.action import Kind
from stageline.schedules.check import check
from stageline.schedules.families.dualpipe_v import dualpipe_v
from stageline.schedules.families.gpipe import gpipe
from stageline.schedules.families.hanayo import hanayo
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.looped_bfs import looped_bfs
from stageline.schedules.families.naive import naive
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.families.v_half import v_half
from stageline.schedules.families.v_min import v_min
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.families.zbv import zbv
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

ONE_CHUNK = (naive, gpipe, one_f_one_b, zb_h1, zb_h2)
V_SHAPED = (zbv, v_half, v_min, dualpipe_v)
ANY_CHUNKS = (interleaved_1f1b, looped_bfs, hanayo)
every_family = pytest.mark.parametrize("family", ONE_CHUNK + V_SHAPED + ANY_CHUNKS)


def assert_sound(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    check(schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (num_ranks, num_microbatches)
    assert_ascending(schedule)


def assert_ascending(schedule: Schedule) -> None:
    """Gradients are added in the order of micro-batches, so that training is bit-identical."""
    microbatches = defaultdict(list)
    for row in schedule.actions:
        for stage, kind, microbatch, _, _ in row:
            if kind is not Kind.F:
                microbatches[stage, "W" if kind is Kind.B else kind].append(microbatch)
    assert all(order == sorted(order) for order in microbatches.values())


@settings(deadline=None)
@given(p=st.integers(1, 9), m=st.integers(1, 24))
def test_any_number_of_micro_batches_on_any_number_of_ranks(p: int, m: int) -> None:
    for family in (*ONE_CHUNK, zbv, v_half, v_min):
        assert_sound(family(p, m), p, m)


@settings(deadline=None)
@given(p=st.integers(1, 9), beyond=st.integers(0, 12))
def test_dualpipe_v_from_two_micro_batches_a_rank_on(p: int, beyond: int) -> None:
    assert_sound(dualpipe_v(p, 2 * p + beyond), p, 2 * p + beyond)


@settings(deadline=None)
@given(p=st.integers(1, 8), m=st.integers(1, 20), v=st.integers(1, 5))
def test_any_number_of_chunks(p: int, m: int, v: int) -> None:
    for schedule in (
        interleaved_1f1b(p, m, chunks_per_rank=v),
        looped_bfs(p, m, chunks_per_rank=v),
        hanayo(p, m, chunks_per_rank=2 * v),
    ):
        assert_sound(schedule, p, m)


@settings(deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 16), v=st.integers(2, 4), data=st.data())
def test_any_group_size_that_interleaving_accepts(
    p: int, m: int, v: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, m))
    try:
        schedule = interleaved_1f1b(p, m, chunks_per_rank=v, group_size=size)
    except ScheduleError:
        assert size < min(p, m) or 0 < m % size < min(p, m)
    else:
        assert_sound(schedule, p, m)


@every_family
def test_the_diagram_in_the_docstring_is_what_runs(family: Callable[[int, int], Schedule]) -> None:
    text = import_module(family.__module__).__doc__ or ""
    p, m = map(int, re.findall(r"\b[pm] = (\d+)", text.split("rank 0 │")[1])[:2])
    drawn = [line.strip() for line in text.splitlines() if line.strip().startswith("rank ")]
    schedule = family(p, m)
    assert drawn == [
        f"rank {rank} │ {' '.join(cells(row, schedule.stages_of(rank)))}"
        for rank, row in enumerate(simulate(schedule).spans)
    ]


def cells(row: tuple[Span, ...], stages: tuple[int, ...]) -> list[str]:
    """Return a cell for each slot, with the second chunk in lower case."""
    slots: list[str] = []
    for (stage, kind, microbatch, _, _), start, end in row:
        letter = kind.value if stage == stages[0] else kind.value.lower()
        slots += [".."] * (int(start) - len(slots)) + [f"{letter}{microbatch}"] * int(end - start)
    return slots


@every_family
def test_a_large_schedule_is_built_at_once(family: Callable[[int, int], Schedule]) -> None:
    start = thread_time()
    family(32, 256)
    assert thread_time() - start < 2  # 0.05 to 0.2 s on an idle core; of work, not of waiting
