"""Each knob of the page of schedules does what it says."""

from __future__ import annotations

import json

from playwright.sync_api import expect
from tests.studio.schedules.conftest import SchedulesPage

from stageline import Costs, Link, Timeline, build_schedule, simulate
from stageline.report.summary import number, percent


def measures_of(timeline: Timeline) -> list[str]:
    """Return the row of a timeline that is the first in the table of measures."""
    return [
        number(timeline.makespan),
        "",
        number(timeline.lower_bound),
        percent(timeline.step_bubble),
        percent(timeline.span_bubble),
        number(max(timeline.peak_activations)),
        number(max(timeline.peak_memory)),
    ]


def timeline_of(name: str, costs: Costs | None = None, **sizes: int) -> Timeline:
    all_sizes = {"num_ranks": 4, "num_microbatches": 8} | sizes
    return simulate(build_schedule(name, **all_sizes), costs)  # type: ignore[arg-type]  # sizes


def test_at_first_two_schedules_are_compared(schedules: SchedulesPage) -> None:
    schedules.open()
    assert schedules.measures("1f1b") == measures_of(timeline_of("1f1b"))
    assert schedules.measures("zb_h1")[:2] == ["27", "−18.2 %"]
    expect(schedules.page.locator("section.figure h2")).to_have_text(["1f1b", "zb_h1"])
    schedules.page.check("#families [value=gpipe]")
    schedules.page.uncheck("#families [value='1f1b']")
    schedules.wait_for_makespan("gpipe", "33")
    expect(schedules.page.locator("section.figure h2")).to_have_text(["gpipe", "zb_h1"])
    schedules.address_has("show=gpipe+zb_h1")


def test_each_size_is_turned(schedules: SchedulesPage) -> None:
    schedules.open(m=12, show="interleaved_1f1b")
    sizes = {"num_microbatches": 12}
    for knob, name, value in (
        ("chunks", "chunks_per_rank", 3),
        ("p", "num_ranks", 6),
        ("m", "num_microbatches", 18),
        ("minibatches", "num_minibatches", 2),
    ):
        sizes[name] = value
        schedules.page.fill(f"#{knob}", str(value))
        schedule = timeline_of("interleaved_1f1b", None, **sizes).schedule
        expected = measures_of(simulate(schedule, Costs.of_a_rank(3)))
        schedules.wait_for_makespan("interleaved_1f1b", expected[0])
        assert schedules.measures("interleaved_1f1b") == expected
        assert schedules.page.input_value(f"#{knob}-slider") == str(value)
    schedules.address_has("p=6&m=18&chunks=3&minibatches=2")


def test_each_cost_is_turned(schedules: SchedulesPage) -> None:
    schedules.open(show="zb_h1")
    costs: dict[str, float] = {}
    turns = {"forward": 1.5, "input_grad": 0.7, "weight_grad": 0.4, "transfer": 0.25}
    for name, value in (turns | {"activation": 3.0, "retained": 2.5}).items():
        costs[name] = value
        schedules.page.fill(f"#{name}", str(value))
        expected = measures_of(timeline_of("zb_h1", Costs.of_a_rank(1, **costs)))
        schedules.wait(
            "[...document.querySelectorAll('#summary td')].map((cell) => cell.textContent)"
            f".join() === {','.join(expected)!r}"
        )
    schedules.address_has(json.dumps(costs, separators=(",", ":")).replace("3.0", "3"))


def test_a_slider_turns_its_number_and_back(schedules: SchedulesPage) -> None:
    schedules.open(show="gpipe")
    schedules.page.focus("#forward-slider")
    schedules.page.keyboard.press("ArrowRight")
    schedules.page.keyboard.press("ArrowRight")
    schedules.wait_for_makespan("gpipe", number(timeline_of("gpipe", Costs(forward=1.1)).makespan))
    assert schedules.page.input_value("#forward") == "1.1"


def test_what_is_no_number_is_marked_and_changes_nothing(schedules: SchedulesPage) -> None:
    schedules.open(show="gpipe")
    error = schedules.page.locator("#error")
    for text in ("", "-1", "2.5", "65", "1e9"):
        schedules.page.fill("#p", text)
        expect(schedules.page.locator("#p")).to_have_attribute("aria-invalid", "true")
        expect(error).to_have_text(f"Ranks is {text or 'empty'}: use a whole number from 1 to 64")
    assert schedules.measures("gpipe")[0] == "33"
    schedules.page.fill("#p", "2")
    expect(error).to_be_empty()
    schedules.page.fill("#forward", "-1")
    expect(error).to_have_text("Forward is -1: use a number of at least 0")
    schedules.page.fill("#forward", "2")
    expect(error).to_be_empty()


def test_a_memory_limit_beyond_all_numbers_is_not_taken_for_none(schedules: SchedulesPage) -> None:
    schedules.open(show="gpipe")
    schedules.page.fill("#memory", "1e400")
    expect(schedules.page.locator("#error")).to_contain_text("memory_limit is not a number of")


def test_a_link_with_more_than_the_page_can_show_has_the_usual_sizes(
    schedules: SchedulesPage,
) -> None:
    schedules.open(show="gpipe", p=10**9, m=10**9, chunks=99, minibatches=99)
    shown = [schedules.page.input_value(f"#{name}") for name in ("p", "m", "chunks", "minibatches")]
    assert shown == ["4", "8", "2", "1"]


def test_each_stage_has_its_own_costs(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b zbv")
    page = schedules.page
    page.click("#stages summary")
    page.select_option("#stage-field", "weight_grad")
    page.fill("#stage-2", "3")
    costs = Costs(weight_grad=[1, 1, 3, 1])
    schedules.wait_for_makespan("1f1b", number(timeline_of("1f1b", costs).makespan))
    parts = [0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 0.5]
    halves = Costs(0.5, 0.5, parts, activation=0.5)
    assert schedules.measures("zbv")[0] == number(timeline_of("zbv", halves).makespan)
    page.fill("#p", "6")  # the new parts cost as much as the last one
    schedules.address_has('"weight_grad":[1,1,3,1,1,1]')
    page.click("#same")
    schedules.address_has('"weight_grad":1.333')


def test_a_file_of_costs_is_pasted(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    page = schedules.page
    page.click("#file summary")
    page.fill("#costs-text", '{"forward": [1, 2, 1, 1], "message": 1, "links": {"bandwidth": 2}}')
    page.click("#apply-costs")
    costs = Costs(forward=[1, 2, 1, 1], message=1.0, links=Link(bandwidth=2.0))
    expected = timeline_of("1f1b", costs)
    schedules.wait_for_makespan("1f1b", number(expected.makespan))
    assert page.locator("#forward").evaluate("(field) => field.closest('.varied') !== null")
    for text, message in (
        ('{"forwards": 1}', "the JSON has 'forwards', but costs are forward, input_grad"),
        ('{"forward": -1}', "forward is -1, but a cost is a finite number >= 0"),
        ('{"forward": ', "the costs are not JSON"),
        ("[1]", 'the costs are not JSON: an object such as {"forward": 1.5} is needed'),
    ):
        page.fill("#costs-text", text)
        page.click("#apply-costs")
        expect(page.locator("#error")).to_contain_text(message)
        assert page.input_value("#costs-text") == text
        assert schedules.measures("1f1b")[0] == number(expected.makespan)


def test_a_file_of_costs_is_opened(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    schedules.page.click("#file summary")
    content = {"name": "costs.json", "mimeType": "application/json", "buffer": b'{"forward": 2}'}
    schedules.page.set_input_files("#costs-file", content)  # type: ignore[arg-type]  # a payload
    schedules.wait_for_makespan("1f1b", number(timeline_of("1f1b", Costs(forward=2)).makespan))


def test_the_memory_limit_marks_ranks_that_hold_more(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b gpipe")
    schedules.page.fill("#memory", "3")
    expect(schedules.page.locator("#legend")).to_contain_text("above the limit")
    assert schedules.measures("1f1b")[-1] == "4 (1 over the limit)"
    assert schedules.measures("gpipe")[-1] == "8 (4 over the limit)"
    schedules.page.fill("#memory", "22GiB")
    expect(schedules.page.locator("#error")).to_contain_text("give costs with activation in bytes")
    schedules.page.fill("#memory", "")
    expect(schedules.page.locator("#error")).to_be_empty()
    assert schedules.measures("1f1b")[-1] == "4"


def test_a_schedule_that_cannot_be_built_says_why_beside_the_others(
    schedules: SchedulesPage,
) -> None:
    schedules.open(show="1f1b hanayo", chunks=3)
    message = "chunks_per_rank is 3, but 'hanayo' needs two for each wave: use 2 or 4"
    assert schedules.verdict("hanayo") == message
    assert schedules.measures("hanayo") == [message]
    assert schedules.measures("1f1b")[0] == "33"


def test_numbers_are_written_as_in_reports(schedules: SchedulesPage) -> None:
    schedules.open()
    values = [0.0, 33.0, 0.12345, 9999.4, 9999.6, 12345.0, 23_622_320_128.0, 1.5e12, 0.001]
    found = schedules.page.evaluate(
        "async (values) => (await import('./static/shared/numbers.js'))"
        ".shortNumber && values.map((await import('./static/shared/numbers.js')).shortNumber)",
        values,
    )
    assert found == [number(value) for value in values]
