"""Overlays of prediction and measurement: the order of lanes, and their common time scale."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from stageline.costs import Costs
from stageline.errors import ReportError
from stageline.report.overlay import Overlay
from stageline.report.timeline import Timeline
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.simulation.simulate import simulate

ROOM = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def overlay(two_ranks: Timeline) -> Overlay:
    """Measured forwards took twice as long as predicted."""
    slow = simulate(one_f_one_b(2, 2), Costs(forward=2.0))
    return Overlay(two_ranks, replace(slow, costs=None), "1f1b", "forwards took < 3")


def lanes(overlay: Overlay) -> list[ET.Element]:
    root = ET.fromstring(overlay.svg())
    return [group for group in root.iter(f"{ROOM}g") if group.get("class") == "lane"]


def test_each_rank_has_what_was_predicted_over_what_was_measured(overlay: Overlay) -> None:
    names = [lane[0].text for lane in lanes(overlay)]
    assert names == ["rank 0 predicted", "measured", "rank 1 predicted", "measured"]


def test_the_two_lanes_of_a_rank_stand_closer_than_ranks_do(overlay: Overlay) -> None:
    shifts = "".join(lane.attrib["transform"] for lane in lanes(overlay))
    tops = [float(top) for top in re.findall(r"translate\(\S+ (\S+)\)", shifts)]
    height = float(lanes(overlay)[0][1].attrib["height"])
    gaps = [below - above - height for above, below in pairwise(tops)]
    assert 0 < gaps[0] < gaps[1]
    assert gaps[0] == pytest.approx(gaps[2])


def test_both_have_one_scale_and_each_ends_where_it_ended(overlay: Overlay) -> None:
    both = (overlay.predicted, overlay.measured)
    ends = [float(lane[1].attrib["width"]) for lane in lanes(overlay)]
    scale = ends[1] / overlay.measured.makespan
    assert ends == pytest.approx([scale * timeline.makespan for timeline in both] * 2, abs=0.01)
    rows = [timeline.spans[rank] for rank in range(2) for timeline in both]
    for lane, row in zip(lanes(overlay), rows, strict=True):
        starts = [float(action.attrib["x"]) for action in lane[2]]
        assert starts == pytest.approx([scale * span.start for span in row], abs=0.01)


def test_the_caption_says_what_explains_the_difference(overlay: Overlay) -> None:
    texts = [text.text for text in ET.fromstring(overlay.svg()).iter(f"{ROOM}text")]
    assert "1f1b" in texts
    assert "forwards took < 3" in texts


def test_memory_which_is_only_predicted_is_not_drawn(overlay: Overlay) -> None:
    assert overlay.predicted.memory
    assert "memory" not in overlay.svg()


def test_it_is_saved_as_a_picture_or_a_page(overlay: Overlay, tmp_path: Path) -> None:
    overlay.save(tmp_path / "both.svg")
    overlay.save(tmp_path / "both.html")
    assert ET.parse(tmp_path / "both.svg").getroot().tag == f"{ROOM}svg"
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<title>1f1b: forwards took &lt; 3</title>" in page
    assert ">rank 1 predicted</text>" in page
    message = r"'both.json' ends in .json, but an overlay is saved as .svg or .html: use one of"
    with pytest.raises(ReportError, match=message):
        overlay.save(tmp_path / "both.json")


def test_in_a_terminal_it_is_letters(overlay: Overlay) -> None:
    wide = len("rank 0 predicted │ ") + 12  # a letter for each unit of time
    assert overlay.text(wide).splitlines() == [
        "rank 0 predicted │ FF..BB.BB",
        "        measured │ FFFF..BB..BB",
        "rank 1 predicted │ .FBBFBB",
        "        measured │ ..FFBBFFBB",
        "F forward · B backward · . idle",
        "forwards took < 3",
    ]
