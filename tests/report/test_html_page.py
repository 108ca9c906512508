from __future__ import annotations

import re

from stageline.report.html import page
from stageline.report.svg.drawing import svg
from stageline.report.timeline import Timeline
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.simulation.simulate import simulate


def table(text: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def test_the_table_has_a_row_of_measures_for_each_rank(two_ranks: Timeline) -> None:
    assert table(page(two_ranks)) == [
        ["rank", "stages", "busy", "idle", "span", "peak activations", "peak memory"],
        ["0", "0", "6", "33.3 %", "9", "2", "2"],
        ["1", "1", "6", "33.3 %", "6", "1", "1"],
    ]


def test_a_rank_with_several_stages_lists_them(v_shape: Timeline) -> None:
    assert [row[1] for row in table(page(v_shape))[1:]] == ["0, 3", "1, 2"]


def test_the_page_holds_the_picture_and_needs_nothing_from_elsewhere(two_ranks: Timeline) -> None:
    text = page(two_ranks)
    assert svg(two_ranks) in text
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|src=|<link|@import|url\(", outside)


def test_numbers_that_only_zooming_shows_are_there() -> None:
    timeline = simulate(one_f_one_b(16, 200))
    assert ">199</text>" in page(timeline)
    assert ">199</text>" not in svg(timeline)


def test_a_name_with_markup_is_text(odd_one: Timeline) -> None:
    assert "<title>&lt;a &amp; &#x27;b&#x27;&gt;, 2 ranks, 1 micro-batch</title>" in page(odd_one)


def test_what_was_not_measured_is_a_dash(nothing: Timeline) -> None:
    assert table(page(nothing))[1] == ["0", "0", "0", "0.0 %", "0", "–", "–"]
