"""Pictures of several mini-batches: versions as small numbers, steps as marks, sizes in words."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from stageline.costs import Costs
from stageline.report.html import page
from stageline.report.perfetto import trace
from stageline.report.summary import heading
from stageline.report.svg.drawing import svg
from stageline.report.text.grid import plain
from stageline.report.text.terminal import coloured
from stageline.report.timeline import Timeline
from stageline.schedules.build import build_schedule
from stageline.simulation.simulate import simulate

ROOM = "{http://www.w3.org/2000/svg}"


def drawn(name: str = "pipedream", costs: Costs | None = None, **sizes: Any) -> Timeline:
    given = {"num_ranks": 2, "num_microbatches": 1, "num_minibatches": 3} | sizes
    return simulate(build_schedule(name, **given), costs)


def groups(timeline: Timeline, css: str) -> list[ET.Element]:
    """Return the elements of each lane."""
    root = ET.fromstring(svg(timeline))
    return [group for group in root.iter(f"{ROOM}g") if group.get("class") == css]


def tooltips(group: ET.Element) -> list[str]:
    return [title.text or "" for title in group.iter(f"{ROOM}title")]


def test_a_version_is_a_small_number_behind_the_micro_batch() -> None:
    assert plain(drawn()).splitlines()[:3] == [
        "rank 0 │ F0⁰ F1⁰ ... ... B0⁰ B0⁰ F2¹ B1⁰ B1⁰ ... B2¹ B2¹",
        "rank 1 │ ... F0⁰ B0⁰ B0⁰ F1¹ B1¹ B1¹ F2² B2² B2²",
        "F forward · B backward · . idle · a cell is 1 · small numbers are weight versions",
    ]


def test_versions_of_two_digits_and_stages_of_a_rank_stand_beside_each_other() -> None:
    rows = plain(drawn("zbv", num_microbatches=2, num_minibatches=11)).splitlines()
    assert "0F20¹⁰" in rows[0]
    assert "1W21¹⁰" in rows[1]


def test_versions_go_where_there_is_no_room_for_them() -> None:
    """8 columns for the name of a rank, 12 cells of a letter, a digit, a version and a blank."""
    texts = {width: plain(drawn(), width).splitlines()[0] for width in (57, 46, 45, 34, 33)}
    assert texts == {
        57: "rank 0 │ F0⁰ F1⁰ ... ... B0⁰ B0⁰ F2¹ B1⁰ B1⁰ ... B2¹ B2¹",
        46: "rank 0 │ F0⁰F1⁰......B0⁰B0⁰F2¹B1⁰B1⁰...B2¹B2¹",
        45: "rank 0 │ F0⁰F1⁰......B0⁰B0⁰F2¹B1⁰B1⁰...B2¹B2¹",
        34: "rank 0 │ F0F1....B0B0F2B1B1..B2B2",
        33: "rank 0 │ F0F1....B0B0F2B1B1..B2B2",
    }
    assert "versions" not in plain(drawn(), 33)


def test_every_kind_has_its_share_of_letters_whatever_the_versions() -> None:
    timeline = drawn(num_ranks=4, num_minibatches=100)
    rows = [row for row in plain(timeline, width=60).splitlines() if "│" in row]
    letters = "".join(row.split("│")[1].strip() for row in rows)
    assert letters.count("F") / len(letters) == pytest.approx(1 / 3, abs=0.04)


def test_a_step_shows_in_the_grid_only_if_it_takes_time() -> None:
    assert "optimizer step" not in plain(drawn())
    assert "optimizer step" not in coloured(drawn(), 100).plain
    slow = plain(drawn(costs=Costs(step=1)))
    assert "S optimizer step" in slow
    assert slow.splitlines()[1] == "rank 1 │ ... F0⁰ B0⁰ B0⁰ S   F1¹ B1¹ B1¹ S   F2² B2² B2² S"


def test_the_heading_counts_mini_batches_and_what_each_consists_of() -> None:
    assert heading(drawn()) == "pipedream, 2 ranks, 3 mini-batches of 1 micro-batch"
    stream = drawn("pipedream_2bw", num_ranks=4, num_microbatches=4, num_minibatches=8)
    assert heading(stream) == "pipedream_2bw, 4 ranks, 8 mini-batches of 4 micro-batches"
    once = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=4))
    assert heading(once) == "1f1b, 2 ranks, 4 micro-batches"


def test_the_summary_of_a_stream_tells_how_busy_it_is_at_full_pace() -> None:
    assert " · busy between fill and drain 100.0 % · " in plain(drawn(num_minibatches=9))
    uneven = Costs(forward=[1, 2], input_grad=[1, 2], weight_grad=[1, 2])
    text = plain(drawn(costs=uneven, num_minibatches=9))
    assert " · busy between fill and drain 52.6 to 100.0 % · " in text
    once = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=8))
    assert once.steady_busy
    assert "busy between" not in plain(once)


def test_versions_stand_in_the_upper_right_of_their_actions() -> None:
    first, second = groups(drawn(), "versions")
    assert [text.text for text in first] == ["0", "0", "0", "1", "0", "1"]
    assert [text.text for text in second] == ["0", "0", "1", "1", "2", "2"]
    ends = [float(text.attrib["x"]) for text in first]
    scale = (ends[1] - ends[0]) / 1  # both forwards, of one unit
    assert [round((x - ends[0]) / scale) + 1 for x in ends] == [1, 2, 6, 7, 9, 12]


def test_a_single_step_has_neither_versions_nor_marks() -> None:
    once = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=4))
    assert not groups(once, "versions")
    assert not groups(once, "ticks")
    assert "version" not in svg(once).split("</style>")[1]


def test_a_step_without_duration_is_a_mark_that_tells_what_it_makes() -> None:
    first, _ = groups(drawn(), "ticks")
    assert tooltips(first) == [
        "0STEP@1: optimizer step on stage 0 makes weights 1, 6 to 6",
        "0STEP@2: optimizer step on stage 0 makes weights 2, 9 to 9",
        "0STEP@3: optimizer step on stage 0 makes weights 3, 12 to 12",
    ]
    actions, _ = groups(drawn(), "actions")
    assert not any("STEP" in tooltip for tooltip in tooltips(actions))


def test_a_step_that_takes_time_is_an_action_like_others() -> None:
    slow = drawn(costs=Costs(step=1))
    actions, _ = groups(slow, "actions")
    assert sum("STEP" in tooltip for tooltip in tooltips(actions)) == 3
    assert not [path for group in groups(slow, "ticks") for path in group]


def test_tooltips_name_the_weights() -> None:
    actions, _ = groups(drawn(), "actions")
    assert tooltips(actions)[3] == (
        "0F2@1: forward of micro-batch 2 on stage 0 with weights 1, 6 to 7"
    )


def test_a_long_stream_is_a_few_paths() -> None:
    timeline = drawn(num_ranks=16, num_minibatches=120)
    assert [len(group) for group in groups(timeline, "ticks")] == [1] * 16
    assert sum(path.attrib["d"].count("M") for g in groups(timeline, "ticks") for path in g) == (
        16 * 120
    )
    assert len(svg(timeline)) < 350_000
    assert "version of the weights" not in svg(timeline)  # none is large enough to be read


def test_traces_name_the_weights() -> None:
    events = [e for e in json.loads(trace(drawn()))["traceEvents"] if e["ph"] == "X"]
    told = {(event["name"], event["ts"]): event["args"] for event in events if event["tid"] == 1}
    assert told["F 2", 6000] == {"stage": 0, "microbatch": 2, "with weights": 1}
    assert told["S", 9000] == {"stage": 0, "microbatch": -1, "makes weights": 2}


def test_the_page_of_a_replicated_stream_tells_the_stage_of_every_rank() -> None:
    timeline = drawn(num_ranks=4, num_microbatches=3, replicas=[3, 1])
    cells = re.findall(r"<tr><td>(\d)</td><td>([^<]*)</td>", page(timeline))
    assert cells == [("0", "0"), ("1", "0"), ("2", "0"), ("3", "1")]
    assert "4 ranks, 3 mini-batches of 3 micro-batches" in page(timeline)


def test_nothing_is_proven_of_replicated_stages() -> None:
    timeline = drawn(num_ranks=4, num_microbatches=3, replicas=[3, 1])
    assert timeline.lower_bound == timeline.span_lower_bound == 0
    assert "lower bound" not in plain(timeline)
