"""The order of every rank's actions, written out for comparison with the papers' figures.

The papers count micro-batches from 1; here they count from 0.
"""

from textwrap import dedent

from stageline.schedules.action import Kind
from stageline.schedules.families.dualpipe_v import dualpipe_v
from stageline.schedules.families.gpipe import gpipe
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.looped_bfs import looped_bfs
from stageline.schedules.families.naive import naive
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.schedule import Schedule


def rows(schedule: Schedule) -> str:
    return "\n".join(" ".join(map(str, row)) for row in schedule.actions)


def literal(text: str) -> str:
    """Parse a schedule; a line that is indented further continues its rank's row."""
    return dedent(text).strip("\n").replace("\n    ", " ")


def test_naive_takes_one_micro_batch_forward_and_back_before_the_next() -> None:
    assert rows(naive(3, 2)) == literal("""
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
        2F0 2B0 2F1 2B1
    """)


def test_gpipe_figure_2c_with_the_backwards_in_ascending_order() -> None:
    assert rows(gpipe(4, 4)) == literal("""
        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
        2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
        3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3
    """)


def test_pipedream_flush() -> None:
    assert rows(one_f_one_b(4, 8)) == literal("""
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
    """)


def test_interleaved_order_of_megatron_figure_4() -> None:
    assert rows(interleaved_1f1b(4, 8, chunks_per_rank=2)) == literal("""
        0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5
            0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1
            0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3
            1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3
            5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7
        2F0 2F1 2F2 2F3 6F0 6F1
            6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5
            6B6 6B7 2B4 2B5 2B6 2B7
        3F0 3F1 3F2 3F3
            7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3
            7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7
            3B4 3B5 3B6 3B7
    """)


def test_interleaved_groups_as_in_megatron_core() -> None:
    schedule = interleaved_1f1b(2, 5, chunks_per_rank=2, group_size=3)
    for row in schedule.actions:
        assert [a.microbatch for a in row if a.kind is Kind.F] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]


def test_interleaved_warm_up_as_in_megatron() -> None:
    schedule = interleaved_1f1b(4, 16, chunks_per_rank=3, group_size=8)
    before_first_backward = [[a.kind for a in row].index(Kind.B) for row in schedule.actions]
    assert before_first_backward == [2 * (4 - r - 1) + (3 - 1) * 8 + 1 for r in range(4)]


def test_looped_breadth_first_finishes_a_chunk_before_the_next() -> None:
    assert rows(looped_bfs(2, 3, chunks_per_rank=2)) == literal("""
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
    """)


def test_zb_h1_weight_gradients_trail_by_one_for_each_earlier_rank() -> None:
    assert rows(zb_h1(4, 8)) == literal("""
        0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4
            0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4
            1I6 1W5 1I7 1W6 1W7
        2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4
            2I7 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4
            3W5 3W6 3W7
    """)


def test_zb_h2_fills_the_first_rank_with_forwards_and_the_last_with_weight_gradients() -> None:
    assert rows(zb_h2(4, 8)) == literal("""
        0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1
            0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1F6 1I2 1W0 1F7 1I3 1W1
            1I4 1W2 1I5 1W3 1I6 1W4 1I7 1W5 1W6 1W7
        2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2W0 2F7 2I5 2W1
            2I6 2W2 2I7 2W3 2W4 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1
            3W2 3W3 3W4 3W5 3W6 3W7
    """)


def test_dualpipe_v_step_by_step() -> None:
    """Each line is a step of DeepSeek's algorithm; ranks without a line skip the step."""
    assert rows(dualpipe_v(4, 10)) == literal("""
        0F0 0F1 0F2 0F3 0F4 0F5
            0F6 7F0
            7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3
            0F7 7B3 7F4 0B0 0F8 7B4 7F5 0B1 0F9 7B5 7F6 0B2
            7B6 7F7 0B3 7B7 7F8 0B4 7B8 7F9 0B5
            7B9 0I6
            0W6 0I7 0W7 0I8 0W8 0I9
            0W9
        1F0 1F1 1F2 1F3
            1F4 6F0 1F5 6F1
            6I0 6W0 6F2 6I1 6W1 6F3
            1F6 6B2 6F4 1B0 1F7 6B3 6F5 1B1 1F8 6B4 6F6 1B2 1F9 6B5 6F7 1B3
            6B6 6F8 1B4 6B7 6F9 1B5
            6B8 1B6 6I9 1I7
            6W9 1I8 1W7 1I9
            1W8 1W9
        2F0 2F1
            2F2 5F0 2F3 5F1 2F4 5F2
            5I0 5W0 5F3
            2F5 5B1 5F4 2B0 2F6 5B2 5F5 2B1 2F7 5B3 5F6 2B2 2F8 5B4 5F7 2B3 2F9 5B5 5F8 2B4
            5B6 5F9 2B5
            5B7 2B6 5B8 2I7 5I9 2I8
            2W7 2I9
            5W9 2W8 2W9
        3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3
            3F4 4B0 4F4 3B0 3F5 4B1 4F5 3B1 3F6 4B2 4F6 3B2 3F7 4B3 4F7 3B3
            3F8 4B4 4F8 3B4 3F9 4B5 4F9 3B5
            4B6 3B6 4B7 3B7 4I8 3I8 4I9 3I9
            4W8 3W8 4W9 3W9
    """)
