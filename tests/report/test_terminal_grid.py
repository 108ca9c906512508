from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from stageline.report.palette import COLOURS, shade
from stageline.report.text.terminal import coloured
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.simulation.simulate import simulate


def colours_of(text: Text, part: str) -> set[str]:
    return {str(span.style) for span in text.spans if text.plain[span.start : span.end] == part}


def test_a_label_stands_once_in_an_action_of_its_colour(two_ranks: Timeline) -> None:
    text = coloured(two_ranks, width=80)
    assert text.plain.startswith("rank 0 │ F0 F1 .. .. B0    .. B1    \n")
    assert colours_of(text, "F0 ") == {f"#FFFFFF on {COLOURS[Kind.F]}"}
    assert colours_of(text, "B1 ") == {f"#000000 on {COLOURS[Kind.B]}"}


def test_later_chunks_are_lighter(v_shape: Timeline) -> None:
    text = coloured(v_shape, width=80)
    assert colours_of(text, "0F0 ") == {f"#FFFFFF on {shade(Kind.F, 0, 2)}"}
    assert colours_of(text, "3F0 ") == {f"#000000 on {shade(Kind.F, 1, 2)}"}
    assert shade(Kind.F, 1, 2) != COLOURS[Kind.F]


def test_a_number_alone_does_where_labels_do_not_fit(two_ranks: Timeline) -> None:
    assert coloured(two_ranks, width=18).plain.startswith("rank 0 │ 01..0 .1 \n")


def test_two_cells_share_a_character_where_nothing_else_fits(two_ranks: Timeline) -> None:
    text = coloured(two_ranks, width=14)
    assert text.plain.splitlines()[:2] == ["rank 0 │ █·█▐▌", "rank 1 │ ▐█▌▌"]
    assert f"{COLOURS[Kind.F]} on {COLOURS[Kind.B]}" in {str(span.style) for span in text.spans}


@pytest.mark.parametrize("width", [40, 80, 160])
def test_lines_never_wrap(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    timeline = simulate(one_f_one_b(8, 32))
    text = coloured(timeline, width)
    with console.capture() as capture:
        console.print(text)
    assert len(capture.get().splitlines()) == len(text.plain.splitlines())
    assert sum(line.startswith("rank") for line in capture.get().splitlines()) == 8


def test_middle_ranks_are_left_out_of_a_low_terminal() -> None:
    text = coloured(simulate(one_f_one_b(64, 64)), width=100, height=24)
    lines = text.plain.splitlines()
    assert len(lines) <= 24
    assert lines[0].startswith("rank  0")
    assert any("45 more ranks" in line for line in lines)
    assert any(line.startswith("rank 63") for line in lines)


def test_odd_timelines_are_drawn(odd_one: Timeline, nothing: Timeline) -> None:
    assert "optimizer step" in coloured(odd_one, width=80).plain
    assert "makespan 0" in coloured(nothing, width=10).plain


def test_a_common_end_gives_timelines_one_scale(two_ranks: Timeline) -> None:
    text = coloured(two_ranks, width=9 + 9, end=18.0)
    assert text.plain.splitlines()[:2] == ["rank 0 │ █·█▐▌", "rank 1 │ ▐█▌▌"]
