from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from stageline.costs import Costs
from stageline.report.palette import shade
from stageline.report.svg.drawing import LEGIBLE, stacked, svg
from stageline.report.svg.geometry import Geometry, geometry_of
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.simulation.simulate import simulate

ROOM = "{http://www.w3.org/2000/svg}"


def geometry(timeline: Timeline) -> Geometry:
    return geometry_of(timeline, LEGIBLE)


def groups(timeline: Timeline, css: str) -> list[ET.Element]:
    root = ET.fromstring(svg(timeline))
    return [group for group in root.iter(f"{ROOM}g") if group.get("class") == css]


def texts(timeline: Timeline, css: str) -> list[str]:
    elements = ET.fromstring(svg(timeline)).iter(f"{ROOM}text")
    return [element.text or "" for element in elements if element.get("class") == css]


def test_each_action_is_a_rectangle_at_its_time(two_ranks: Timeline) -> None:
    scale = geometry(two_ranks).scale
    for group, row in zip(groups(two_ranks, "actions"), two_ranks.spans, strict=True):
        for rectangle, (action, start, end) in zip(group, row, strict=True):
            assert rectangle.get("class") == f"{action.kind}0"
            assert float(rectangle.attrib["x"]) == pytest.approx(start * scale, abs=0.01)
            assert float(rectangle.attrib["width"]) == pytest.approx(
                (end - start) * scale, abs=0.01
            )


def test_the_mouse_is_told_what_an_action_is(two_ranks: Timeline) -> None:
    first = groups(two_ranks, "actions")[1][1]
    assert first[0].text == "1B0: backward of micro-batch 0 on stage 1, 2 to 4"


def test_actions_carry_the_numbers_of_their_microbatches(two_ranks: Timeline) -> None:
    labels = [[label.text for label in group] for group in groups(two_ranks, "labels")]
    assert labels == [["0", "1", "0", "1"], ["0", "0", "1", "1"]]


def test_chunks_of_a_rank_differ_in_shade(v_shape: Timeline) -> None:
    classes = [rectangle.get("class") for rectangle in groups(v_shape, "actions")[0]]
    assert classes == ["F0", "F1", "I1", "W1", "I0", "W0"]
    assert f".F1{{fill:{shade(Kind.F, 1, 2)}}}" in svg(v_shape)


def test_the_memory_curve_rises_to_its_peak_and_tells_it(two_ranks: Timeline) -> None:
    memory = geometry(two_ranks).memory
    shares = {}
    for path, dot, label in groups(two_ranks, "memory"):
        highest = min(float(y) for y in re.findall(r"V([\d.]+)", path.attrib["d"]))
        assert float(dot.attrib["cy"]) == highest
        shares[label.text] = 1 - highest / memory
    assert shares == pytest.approx({"2": 1.0, "1": 0.5}, abs=0.01)


def test_memory_steps_at_the_times_of_the_timeline(two_ranks: Timeline) -> None:
    scale = geometry(two_ranks).scale
    path = groups(two_ranks, "memory")[0][0].attrib["d"]
    times = [float(x) / scale for x in re.findall(r"H([\d.]+)", path)]
    assert times == pytest.approx([0, 1, 6, 9, 9], abs=0.01)


def test_title_and_axis_say_what_is_shown(two_ranks: Timeline) -> None:
    assert texts(two_ranks, "title") == ["1f1b"]
    assert texts(two_ranks, "axis") == [*map(str, range(10)), "time"]
    assert any("step bubble 33.3 %" in text for text in texts(two_ranks, "small"))


def test_a_large_picture_is_a_few_paths_and_stays_small() -> None:
    timeline = simulate(one_f_one_b(32, 96))
    picture = svg(timeline)
    outlines = [path.attrib["d"] for group in groups(timeline, "actions") for path in group]
    assert sum(outline.count("M") for outline in outlines) == 2 * 32 * 96
    assert len(outlines) == 2 * 32
    assert len(picture) < 500_000


def test_numbers_that_would_not_fit_are_left_out() -> None:
    timeline = simulate(one_f_one_b(16, 200))
    assert not any(len(group) for group in groups(timeline, "labels"))
    assert 'class="white"' in svg(timeline, min_font=0.5)


def test_a_name_with_markup_is_text(odd_one: Timeline) -> None:
    assert texts(odd_one, "title") == ["<a & 'b'>"]


def test_no_memory_no_curve(nothing: Timeline) -> None:
    assert groups(nothing, "lane")
    assert not groups(nothing, "memory")
    assert "memory held" not in texts(nothing, "small")


def test_stacked_timelines_share_one_scale(two_ranks: Timeline) -> None:
    slow = simulate(one_f_one_b(2, 2), Costs(forward=2.0, input_grad=2.0, weight_grad=2.0))
    root = ET.fromstring(stacked([two_ranks, slow]))
    pictures = [group for group in root.iter(f"{ROOM}g") if group.get("class") == "timeline"]
    widths = [
        float(element.attrib["width"])
        for picture in pictures
        for element in picture.iter(f"{ROOM}rect")
        if element.get("class") == "idle" and element.get("x") is None
    ]
    assert widths == pytest.approx([widths[2] / 2] * 2 + [geometry(slow).lanes_width] * 2)
    assert pictures[0].get("transform") is None
    assert pictures[1].get("transform") == f"translate(0 {geometry(slow).height:g})"
    assert float(root.attrib["height"]) == pytest.approx(2 * geometry(slow).height)
