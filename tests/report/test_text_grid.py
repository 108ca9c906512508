from __future__ import annotations

import pytest

from stageline.costs import Costs
from stageline.report.text.grid import plain
from stageline.report.timeline import Timeline
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate


def grid_rows(text: str) -> list[str]:
    return [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]


def test_two_ranks_written_out(two_ranks: Timeline) -> None:
    assert plain(two_ranks).splitlines()[:3] == [
        "rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1",
        "rank 1 │ .. F0 B0 B0 F1 B1 B1",
        "F forward · B backward · . idle · a cell is 1",
    ]


def test_measures_stand_beneath_the_grid(two_ranks: Timeline) -> None:
    measures = plain(two_ranks).splitlines()[-1]
    assert measures.startswith("1f1b, 2 ranks, 2 micro-batches · makespan 9")
    assert "step bubble 33.3 %" in measures
    assert measures.endswith("peak activations 2 (rank 0)")


def test_what_is_proven_of_the_makespan_is_told(two_ranks: Timeline) -> None:
    assert "makespan 9 (lower bound 8) · " in plain(two_ranks)
    best = Schedule.from_text("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    assert "makespan 7 (optimal for this memory) · " in plain(simulate(best))


def test_stages_are_named_where_a_rank_holds_several(v_shape: Timeline) -> None:
    assert grid_rows(plain(v_shape)) == [
        "0F0 ... ... 3F0 3I0 3W0 ... 0I0 0W0",
        "... 1F0 2F0 ... ... 2I0 1I0 2W0 1W0",
    ]


def test_half_units_make_half_cells() -> None:
    timeline = simulate(Schedule.from_text("0F0 0B0", "1F0 1B0"), Costs(transfer=0.5))
    assert grid_rows(plain(timeline)) == [
        "F0 F0 .. .. .. .. .. .. .. .. B0 B0 B0 B0",
        ".. .. .. F0 F0 B0 B0 B0 B0",
    ]


def test_a_cell_is_the_shortest_action_where_no_time_divides_them_all() -> None:
    costs = Costs(forward=1.0, input_grad=1.037, weight_grad=1.041)
    timeline = simulate(Schedule.from_text("0F0 0B0", "1F0 1B0"), costs)
    assert grid_rows(plain(timeline)) == ["F0 .. .. .. B0 B0", ".. F0 B0 B0"]


def test_uneven_stages_keep_the_picture_short_and_say_so() -> None:
    costs = Costs(forward=[0.02, 1.0], input_grad=[0.03, 1.0], weight_grad=[0.01, 1.0])
    text = plain(simulate(Schedule.from_text("0F0 0B0", "1F0 1B0"), costs))
    assert grid_rows(text) == ["", "F0 F0 F0 F0 B0 B0 B0 B0 B0 B0 B0 B0"]
    assert "shorter actions may be hidden" in text


def test_times_in_other_units_give_the_same_grid(two_ranks: Timeline) -> None:
    tiny = Costs(forward=1e-12, input_grad=1e-12, weight_grad=1e-12)
    in_picoseconds = simulate(one_f_one_b(2, 2), tiny)
    assert grid_rows(plain(in_picoseconds)) == grid_rows(plain(two_ranks))


def test_a_narrow_terminal_gets_one_letter_a_cell(two_ranks: Timeline) -> None:
    assert grid_rows(plain(two_ranks, width=18)) == ["FF..BB.BB", ".FBBFBB"]


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_no_row_is_wider_than_the_terminal(width: int) -> None:
    text = plain(simulate(one_f_one_b(8, 32)), width)
    assert max(map(len, text.splitlines())) <= width


def test_every_kind_has_its_share_of_a_picture_with_few_cells() -> None:
    timeline = simulate(one_f_one_b(4, 100))
    letters = "".join(grid_rows(plain(timeline, width=60)))
    assert letters.count("F") / len(letters) == pytest.approx(1 / 3, abs=0.03)
    assert letters.count("B") / len(letters) == pytest.approx(2 / 3, abs=0.05)


def test_an_action_without_duration_and_an_empty_rank(odd_one: Timeline) -> None:
    assert grid_rows(plain(odd_one)) == ["S", ""]


@pytest.mark.parametrize("width", [None, 5, 80])
def test_an_empty_timeline_has_its_ranks_and_measures(nothing: Timeline, width: int | None) -> None:
    text = plain(nothing, width)
    assert text.splitlines()[:2] == ["rank 0 │", "rank 1 │"]
    assert "makespan 0" in text


def test_a_common_end_gives_timelines_one_scale(two_ranks: Timeline) -> None:
    assert grid_rows(plain(two_ranks, width=18 + 9, end=18.0)) == ["FF..BB.BB", ".FBBFBB"]
