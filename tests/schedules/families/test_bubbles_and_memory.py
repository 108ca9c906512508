"""The papers' formulas for bubble and memory, exactly, over a grid of sizes.

F, I and W of a chunk take one slot each and a chunk's activations one unit, unless a test says
otherwise, so that counts are whole numbers and `==` means it.
"""

from itertools import product

import pytest

from stageline.costs import Costs
from stageline.report.timeline import Timeline
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
from stageline.simulation.simulate import simulate

RANKS = (1, 2, 3, 4, 7, 8)
SIZES = [(p, m) for p in RANKS for m in (p, p + 1, 2 * p, 3 * p, 4 * p + 3)]
WHOLE_GROUPS = [(p, p * groups, v) for p, groups, v in product(RANKS, (1, 2, 5), (2, 3, 4))]
V_SIZES = [(p, p) for p in (*range(4, 13), 31, 32)]
V_SIZES += [(p, p * n) for p, n in product((4, 5, 6, 7, 8, 9, 16, 24, 32), (2, 3, 4))]

sizes = pytest.mark.parametrize(("p", "m"), SIZES)
whole_groups = pytest.mark.parametrize(("p", "m", "v"), WHOLE_GROUPS)
v_sizes = pytest.mark.parametrize(("p", "m"), V_SIZES)


def bubble_time(timeline: Timeline) -> float:
    """Return the idle time in the longest span of a rank."""
    longest, work = max(zip(timeline.rank_spans, timeline.busy, strict=True))
    return longest - work


@sizes
def test_naive_keeps_one_rank_at_work_with_one_micro_batch(p: int, m: int) -> None:
    timeline = simulate(naive(p, m))
    assert timeline.step_bubble == pytest.approx((p - 1) / p, rel=1e-12)
    assert timeline.peak_activations == (1,) * p


@sizes
def test_gpipe_bubble_is_k_minus_1_of_m_plus_k_minus_1(p: int, m: int) -> None:
    timeline = simulate(gpipe(p, m))
    assert timeline.step_bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert timeline.peak_activations == (m,) * p


@sizes
def test_1f1b_has_the_bubble_of_gpipe_and_holds_a_micro_batch_for_each_rank_that_follows(
    p: int, m: int
) -> None:
    timeline = simulate(one_f_one_b(p, m))
    assert bubble_time(timeline) == 3 * (p - 1)
    assert timeline.step_bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert timeline.peak_activations == tuple(range(p, 0, -1))


@whole_groups
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, m: int, v: int) -> None:
    chunk = Costs(forward=1 / v, input_grad=1 / v, weight_grad=1 / v)
    timeline = simulate(interleaved_1f1b(p, m, chunks_per_rank=v), chunk)
    ideal = 3 * m
    assert timeline.makespan == pytest.approx(ideal * (1 + (p - 1) / (v * m)), rel=1e-12)


@whole_groups
def test_interleaving_holds_the_chunks_of_its_warm_up(p: int, m: int, v: int) -> None:
    timeline = simulate(interleaved_1f1b(p, m, chunks_per_rank=v))
    warm_up = [2 * (p - r - 1) + (v - 1) * p for r in range(p)]
    assert timeline.peak_activations == tuple(min(held + 1, m * v) for held in warm_up)


@whole_groups
def test_looped_breadth_first_has_the_bubble_of_interleaving_and_holds_everything(
    p: int, m: int, v: int
) -> None:
    timeline = simulate(looped_bfs(p, m, chunks_per_rank=v))
    assert timeline.makespan == 3 * (m * v + p - 1)
    assert timeline.peak_activations == (m * v,) * p


@sizes
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(p: int, m: int) -> None:
    timeline = simulate(zb_h1(p, m))
    assert bubble_time(timeline) == p - 1
    assert timeline.peak_activations == (p,) * p


@pytest.mark.parametrize(("f", "b", "w"), [(4, 4, 2), (3, 2, 1), (8, 7, 6)])
@sizes
def test_zb_h1_bubble_with_other_costs(p: int, m: int, f: float, b: float, w: float) -> None:
    timeline = simulate(zb_h1(p, m), Costs(forward=f, input_grad=b, weight_grad=w))
    assert bubble_time(timeline) == (p - 1) * (f + b - w)


@pytest.mark.parametrize(
    ("f", "b", "w", "c"), [(1, 1, 1, 0), (4, 4, 2, 0), (8, 7, 6, 0), (8, 8, 4, 1), (9, 8, 7, 1)]
)
@sizes
def test_zb_h2_bubble(p: int, m: int, f: float, b: float, w: float, c: float) -> None:
    m = max(m, 2 * p - 1)
    costs = Costs(forward=f, input_grad=b, weight_grad=w, transfer=c)
    timeline = simulate(zb_h2(p, m), costs)
    assert bubble_time(timeline) == (p - 1) * (f + b + 2 * c - 2 * w)
    assert timeline.peak_activations == (2 * p - 1,) * p


@sizes
def test_zb_v_has_no_bubble_and_the_same_memory_on_every_rank(p: int, m: int) -> None:
    m = max(m, 2 * p)
    timeline = simulate(zbv(p, m))
    assert timeline.span_bubble == 0
    assert timeline.peak_activations == (2 * p,) * p


@v_sizes
def test_v_half_holds_half_of_the_micro_batches_and_has_half_of_the_bubble(p: int, m: int) -> None:
    timeline = simulate(v_half(p, m))
    assert max(timeline.peak_activations) / 2 <= p / 2 + 1
    assert bubble_time(timeline) <= 6 * (p - 1) / 2  # half of 1F1B's
    assert bubble_time(timeline) == 3 * (p - 1) - p % 2  # as found here; the paper has no count


@v_sizes
def test_v_min_holds_a_third_of_the_micro_batches_and_has_two_thirds_of_the_bubble(
    p: int, m: int
) -> None:
    timeline = simulate(v_min(p, m))
    assert max(timeline.peak_activations) / 2 <= p / 3 + 2
    assert bubble_time(timeline) <= 6 * (p - 1) * 2 / 3 + 1  # two thirds of 1F1B's, and O(1)
    assert bubble_time(timeline) == 4 * (p - 1) + (-1 if p % 3 else 1)  # as found here


@sizes
def test_dualpipe_v_holds_at_most_one_chunk_more_than_two_for_each_rank(p: int, m: int) -> None:
    timeline = simulate(dualpipe_v(p, max(m, 2 * p)))
    assert max(timeline.peak_activations) <= 2 * p + 1


@pytest.mark.parametrize("num_waves", [1, 2, 3])
@pytest.mark.parametrize(("p", "groups"), list(product(RANKS, (1, 2, 5))))
def test_hanayo_waves_divide_the_bubble_in_the_memory_of_1f1b(
    p: int, groups: int, num_waves: int
) -> None:
    """The paper's (2p - 2) / (3pw + p - 1) is for m = p, and not lower."""
    m, w = groups * p, num_waves
    timeline = simulate(hanayo(p, m, chunks_per_rank=2 * w))
    assert timeline.makespan == 6 * w * m + 4 * (p - 1)
    assert max(timeline.peak_activations) == 2 * w * p
    if groups == 1:
        assert timeline.step_bubble <= (2 * p - 2) / (3 * p * w + p - 1)


@sizes
def test_hanayo_with_one_wave_needs_no_multiple_of_the_ranks(p: int, m: int) -> None:
    timeline = simulate(hanayo(p, m))
    assert timeline.makespan == 6 * m + 4 * (p - 1)
    assert max(timeline.peak_activations) == 2 * p
