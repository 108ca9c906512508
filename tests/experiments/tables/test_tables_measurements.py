"""Measurements on emulated accelerators: the parts of a step, and what is stored."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
from experiments.results import Results
from experiments.tables import emulate, gpipe_program, measure, schedules, worker
from experiments.tables.__main__ import HERE, app
from experiments.tables.breakdown import Parts, parts_of_step
from experiments.tables.report import TABLES, markdown, replace_between, step_parts
from typer.testing import CliRunner

import stageline as sl
from stageline.report.spans import Span
from stageline.zoo import emulated


@pytest.fixture
def no_short_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep at least as long as asked: on a busy machine the usual lateness is taken off."""
    monkeypatch.setattr(emulated, "lateness", lambda: 0.0)


COSTS = sl.Costs(
    forward=[0.002, 0.004],
    input_grad=0.002,
    weight_grad=0.002,
    recompute=[0.002, 0.004],
    step=0.004,
    message=[2.0, 0.0],
    links=sl.Link(bandwidth=1000),
)


def traced(*rows: str) -> sl.Timeline:
    """Return a timeline from rows of actions with their starts and ends."""
    cells = [[cell.split() for cell in row.split(",")] for row in rows]
    schedule = sl.Schedule.from_text(*(" ".join(cell[0] for cell in row) for row in cells))
    spans = tuple(
        tuple(
            Span(action, float(start), float(end))
            for action, (_, start, end) in zip(actions, row, strict=True)
        )
        for actions, row in zip(schedule.actions, cells, strict=True)
    )
    return sl.Timeline(spans, schedule.placement)


# Rank 1 takes 3 for its forward, where rank 0 takes 1. Gaps of 0.5 belong to nobody.
UNEVEN = ("0F0 0.5 1.5, 0B0 1.5 2.5, 0B0 8 10", "1F0 1.5 4.5, 1B0 4.5 5.5, 1B0 6 8")


def test_the_parts_of_a_step_are_what_its_spans_say() -> None:
    parts = parts_of_step(traced(*UNEVEN), whole=11.0, links=False)
    assert parts.compute == pytest.approx((1 + 2 + 3 + 2) / 2)
    assert parts.recompute == pytest.approx((1 + 1) / 2)
    assert parts.update == 0
    # rank 0 waits from 2.5 to 8, rank 1 until 1.5 and from 8 to 10
    assert parts.bubble + parts.imbalance == pytest.approx((5.5 + 1.5 + 2) / 2)
    assert parts.bubble == pytest.approx((1 + 3) / 2 + 2)  # one mean forward and backward
    assert parts.set_up == pytest.approx((0.5 + 0.5) / 2 + 1)  # and 1 after the last action
    assert parts.total == pytest.approx(11.0)


def test_waiting_for_a_link_is_transfer() -> None:
    """The middle rank is a link: the value of 0F0 is on it from 1 to 3."""
    rows = ("0F0 0 1, 0B0 9 10", "1F0 1 3, 1B0 7 9", "2F0 3 5, 2B0 5 7")
    parts = parts_of_step(traced(*rows), whole=10.0, links=True)
    assert parts.transfer == pytest.approx((2 + 2) / 2)  # the value, and its gradient
    assert parts.bubble + parts.imbalance == pytest.approx((6 + 1 + 3) / 2)
    assert parts.set_up == 0
    assert parts.total == pytest.approx(10.0)


def parts_simulated(costs: sl.Costs, *, links: bool = False) -> Parts:
    timeline = gpipe_program.as_traced(gpipe_program.timeline(costs, 8))
    return parts_of_step(timeline, timeline.makespan, links=links)


def test_equal_stages_wait_for_the_bubble_alone() -> None:
    """Three ranks before the last: three forwards, and three backwards of twice the time."""
    parts = parts_simulated(sl.Costs([1.0] * 4, 1, 1, recompute=1, step=0.5))
    assert astuple(parts) == pytest.approx((8 * 3, 8, 3 * 3, 0, 0, 0, 0.5))


def test_a_slow_stage_is_imbalance_and_a_slow_link_is_transfer() -> None:
    uneven = parts_simulated(sl.Costs([1.0, 2.0, 1.0], 1, 1, recompute=[1, 2, 1]))
    assert (
        uneven.imbalance > 5
    )  # the others wait for eight forwards and recomputations, each 1 more
    assert uneven.transfer == 0
    link = sl.Link(bandwidth=0.5)
    linked = sl.Costs([1.0, 1.0], 1, 1, recompute=1, message=[1, 0], links=link)
    slow = parts_simulated(gpipe_program.with_links_as_ranks(linked), links=True)
    assert slow.transfer > 5  # a forward of 1 waits for a message of 2


@pytest.mark.usefixtures("no_short_sleeps")
@pytest.mark.parametrize("links", [False, True])
def test_the_parts_of_a_measured_step_add_up_to_the_whole(links: bool) -> None:
    made = emulate.emulated(COSTS, num_microbatches=4, scale=1.0, links=links)
    with made.pipe:
        made.warm_up()
        timeline, seconds = made.traced_step()
    parts = parts_of_step(timeline, 1e3 * seconds, links=links)
    assert parts.total == pytest.approx(1e3 * seconds)
    assert sum(parts.shares().values()) == pytest.approx(1)
    assert min(astuple(parts)) >= 0
    assert parts.recompute >= 4 * (2 + 4) / 2
    assert parts.compute >= 4 * ((2 + 4) + (4 + 4)) / 2
    assert parts.update >= 4
    assert (parts.transfer > 0) == links


@pytest.mark.usefixtures("no_short_sleeps")
def test_a_step_takes_the_simulated_time_at_least() -> None:
    found = emulate.measure(COSTS, num_microbatches=4, scale=0.5, steps=2, links=True)
    least = gpipe_program.makespan(COSTS, 4)
    assert len(found["steps"]) == 2
    assert min(found["steps"]) >= least  # in seconds of the device, not of the emulation


def test_measuring_without_predictions_says_what_to_do(tmp_path: Path) -> None:
    command = ["measure", "--results", str(tmp_path / "results.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "run `predict` first" in " ".join(result.output.replace("│", " ").split())


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    command = ["measure", "--part", "tabels", "--results", str(tmp_path / "results.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "tabels" in result.output


def test_a_measurement_that_is_stored_is_not_made_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    asked: list[int] = []

    def run(steps: int) -> dict[str, list[int]]:
        asked.append(steps)
        return {"steps": [steps]}

    job = measure.Job("tables", "measure something", run)
    for steps in (3, 4):
        measure.measure(results, job, steps)
    assert asked == [3]


def test_the_table_of_parts_shows_the_step_of_the_median_time() -> None:
    names = ("compute", "recompute", "bubble", "imbalance", "transfer", "set-up", "update")
    shares = [dict.fromkeys(names, value) for value in (0.1, 0.2, 0.3)]
    runs = {"breakdown K=4": {"steps": [2.0, 9.0, 3.0], "shares": shares}}
    rows = {row[0]: row[1:] for row in step_parts(runs).rows}
    assert rows["compute"] == ("65.6 %", "–", "–", "–", "30.0 %", "–", "–")


def test_tables_are_written_between_their_markers_twice_the_same() -> None:
    text = "before\n<!-- breakdown --><!-- end of breakdown -->\nafter"
    table = markdown(step_parts({}))
    once = replace_between(text, "breakdown", table)
    assert table in once
    assert replace_between(once, "breakdown", table) == once


def test_parts_have_the_names_of_the_paper() -> None:
    assert {"compute", "recompute", "bubble", "imbalance", "set-up", "update"} <= set(
        Parts(1, 1, 1, 1, 1, 1, 1).shares()
    )


def test_the_readme_has_the_tables_of_the_results() -> None:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    runs = Results(HERE / "results.json").read()
    for make in TABLES:
        table = make(runs)
        between = readme.split(f"<!-- {table.key} -->")[1].split(f"<!-- end of {table.key} -->")[0]
        assert between == f"\n{markdown(table)}\n", table.title


def test_a_report_needs_nothing_but_the_results(tmp_path: Path) -> None:
    """Of a machine where nothing was measured yet."""
    keys = [make({}).key for make in TABLES]
    text = "".join(f"<!-- {key} --><!-- end of {key} -->\n" for key in keys)
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    command = ["report", "--folder", str(tmp_path), "--results", str(tmp_path / "results.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "65.6 %" in (tmp_path / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in tmp_path.glob("*.svg")}
    assert names == {"throughput.svg", "links.svg", "breakdown.svg", "schedules.svg"}


@pytest.mark.parametrize("title", ["GPipe, recomputed", "ZB-V", "PipeDream"])
def test_a_schedule_runs_and_is_no_faster_than_its_work(
    monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    """In threads here, and with small layers."""
    monkeypatch.setattr(emulated, "lateness", lambda: 0.0)
    monkeypatch.setattr(schedules, "SECONDS", 0.0005)
    monkeypatch.setattr(schedules, "FLOATS", 64)
    found = worker.run(schedules.BY_TITLE[title], steps=1)
    fastest = 1 / (3 * schedules.LAYERS / schedules.RANKS * schedules.SECONDS)
    assert 0 < found.rates[0] <= fastest
    assert found.update_ms > 0
