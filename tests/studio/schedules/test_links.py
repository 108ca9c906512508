"""Links restore the state; searches are watched; what is saved is what Stageline itself writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.studio.schedules.conftest import SchedulesPage

import stageline as sl
from stageline.report.perfetto import trace
from stageline.report.summary import number
from stageline.report.svg.drawing import svg


def test_a_link_shows_the_same(schedules: SchedulesPage, studio: str, page: Page) -> None:
    schedules.open(p=3, m=5, show="1f1b zbv")
    given = schedules.page
    given.fill("#forward", "1.5")
    given.fill("#memory", "2")
    schedules.keys("1f1b", "ArrowRight", "ArrowRight", "Alt+ArrowRight", "+")
    given.click("#step-on")
    schedules.address_has("1f1b*0.1.2")
    schedules.address_has("time=")
    schedules.address_has("view=")
    query = given.url.partition("?")[2]
    page.goto(f"{studio}schedules?{query}")  # another studio, another window
    expect(page.locator("#summary tbody tr")).to_have_count(2)
    page.locator("#figures canvas.lanes").first.wait_for()
    for part in ("#summary", "#rank-table", "#running"):
        expect(page.locator(part)).to_have_text(given.locator(part).text_content() or "")
    for knob in ("p", "m", "forward", "memory", "time"):
        assert page.input_value(f"#{knob}") == given.input_value(f"#{knob}")
    pixels = "(canvas) => canvas.toDataURL()"
    for name in ("1f1b", "zbv"):
        shown = page.locator(f"section[data-name='{name}'] .lanes").evaluate(pixels)
        assert shown == schedules.figure(name).locator(".lanes").evaluate(pixels)


@pytest.mark.parametrize(
    "query",
    [
        "p=0&m=-3&chunks=x&view=5+1&time=nan&costs={&search={",
        "costs=[1]&search=null&show=searched",
        "costs={}&show=1f1b&view=100+200&time=1e9",
    ],
)
def test_what_cannot_be_read_in_an_address_is_as_by_default(
    schedules: SchedulesPage, query: str
) -> None:
    schedules.page.goto(f"{schedules.address}schedules?{query}")
    schedules.page.locator("#legend li").first.wait_for()
    expect(schedules.page.locator("#error")).to_be_empty()
    assert schedules.page.input_value("#p") == "4"


def test_a_name_that_is_not_known_says_so(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1c gpipe")
    assert schedules.verdict("1f1c") == "schedule '1f1c' is not known: did you mean '1f1b'?"
    schedules.page.check("#families [value='1f1b']")
    schedules.wait_for_makespan("1f1b", "33")
    assert schedules.figure("1f1c").count() == 0


def test_a_search_is_watched_and_its_link_finds_the_same(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    page = schedules.page
    page.fill("#weight_grad", "0.5")
    page.click("#search summary")
    page.select_option("#search-kind", "zb_2p")
    page.fill("#search-seconds", "0.2")
    page.click("#search-start")
    costs = sl.Costs(weight_grad=0.5)
    expected = sl.simulate(sl.search_schedule(4, 8, costs, memory_limit=8, time_budget=0.2), costs)
    schedules.wait_for_makespan("searched", number(expected.makespan))
    status = page.locator("#search-status")
    expect(status).to_contain_text(f"makespan {number(expected.makespan)}")
    schedules.address_has("searched")
    page.reload()
    schedules.wait_for_makespan("searched", number(expected.makespan))
    page.fill("#m", "9")  # the result was for other sizes
    expect(schedules.figure("searched")).to_have_count(0)
    page.click("#search summary")
    page.fill("#search-seconds", "0")
    page.click("#search-start")
    expect(status).to_have_text("time_budget is 0: input should be greater than 0")


def test_a_search_shows_how_much_is_done_and_is_stopped(schedules: SchedulesPage) -> None:
    costs = {"forward": [1, 1.3, 0.9, 1.2, 1, 1.1, 0.8, 1.4], "transfer": 0.13}
    schedules.open(show="1f1b", p=8, m=16, costs=json.dumps(costs))
    page = schedules.page
    page.click("#search summary")
    page.select_option("#search-kind", "zb_1p")
    page.fill("#search-seconds", "60")
    page.click("#search-start")
    schedules.wait("document.querySelector('#search-progress').value > 0")
    page.click("#search-stop")
    expect(page.locator("#search-status")).to_have_text("stopped")
    expect(page.locator("#search-start")).to_be_enabled()
    assert schedules.figure("searched").count() == 0


def saved(schedules: SchedulesPage, name: str, label: str) -> tuple[str, str]:
    with schedules.page.expect_download() as download:
        schedules.figure(name).get_by_role("button", name=label, exact=True).click()
    path = Path(download.value.path())
    return download.value.suggested_filename, path.read_text()


def test_a_schedule_is_saved(schedules: SchedulesPage) -> None:
    schedules.open(show="zb_h1", costs='{"forward":1.5}')
    schedule = sl.build_schedule("zb_h1", num_ranks=4, num_microbatches=8)
    timeline = sl.simulate(schedule, sl.Costs(forward=1.5))
    assert saved(schedules, "zb_h1", "SVG") == ("zb_h1.svg", svg(timeline))
    assert saved(schedules, "zb_h1", "Perfetto") == ("zb_h1.json", trace(timeline))
    name, text = saved(schedules, "zb_h1", "CSV")
    assert name == "zb_h1.csv"
    assert sl.Schedule.from_text(*(row.replace(",", " ") for row in text.split())) == schedule


def test_the_line_of_python_is_shown(schedules: SchedulesPage) -> None:
    schedules.open(show="gpipe", costs='{"forward":1.5}')
    schedules.figure("gpipe").get_by_role("button", name="Python").click()
    line = schedules.figure("gpipe").locator(".python")
    expect(line).to_be_visible()
    names: dict[str, sl.Timeline] = {}
    exec(line.input_value(), names)  # noqa: S102  as the user does
    assert schedules.measures("gpipe")[0] == number(names["timeline"].makespan)


def test_nothing_is_cut_off_at_the_side(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b interleaved_1f1b zbv", p=8, m=16)
    page = schedules.page
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for width in (320, 480, 2560, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        schedules.wait(f"document.querySelector('.lanes').clientWidth > {0.55 * width}")
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_pictures_follow_the_dark_mode(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    corner = """() => {
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(document.querySelector(".lanes"), -200, -30);
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    schedules.page.emulate_media(color_scheme="dark")
    schedules.wait(f"({corner})()[0] < 64")  # an idle place
    schedules.page.emulate_media(color_scheme="light")
    schedules.wait(f"({corner})()[0] > 192")
