"""The page of plans in a browser: what it shows, what its knobs do, and what a link restores."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.studio.plans.requests import as_text, posted, small_cluster, small_profile
from tests.studio.sharing import overflow

from stageline.planning.search.search import ReportProgress
from stageline.studio.plans import routes

FILLED = (
    "() => document.querySelector('#scatter svg').clientWidth == "
    "document.querySelector('#scatter').clientWidth"
)
PATH = "api/plans/compare"
Change = Callable[[Page], object]


def compared(page: Page, change: Change) -> Any:
    """Change something, and return what the studio answers to the request that the page makes."""
    with page.expect_response("**/api/plans/compare") as caught:
        change(page)
    page.wait_for_selector("body:not([aria-busy])")
    request = caught.value.request
    _, answer = posted(request.url.removesuffix("api/plans/compare"), PATH, request.post_data_json)
    found = answer["result"]
    if found["has_best"]:
        best = page.locator(".way.best")
        expect(best).to_have_attribute("data-way", found["ways"][0]["description"])
    return found


@pytest.fixture(scope="module")
def link(planner: str, shared_page: Page) -> str:
    """A link to the small profile and cluster, which the shared page keeps."""
    page = shared_page
    page.goto(f"{planner}plans?batch_size=8")
    page.locator("#texts").evaluate("details => { details.open = true; }")
    page.fill("#cluster", as_text(small_cluster()))
    page.fill("#profile", as_text(small_profile()))
    expect(page.locator("#summary")).to_contain_text("8 layers on 4 devices of 24MiB")
    return page.url


@pytest.fixture
def small(link: str, shared_page: Page) -> Page:
    """The page with the small profile and cluster, and all knobs as they are described."""
    shared_page.goto("about:blank")
    shared_page.goto(link)
    shared_page.locator("#texts").evaluate("details => { details.open = true; }")
    expect(shared_page.locator("#summary")).to_contain_text("8 layers on 4 devices of 24MiB")
    return shared_page


def test_an_example_is_there_at_once_and_another_can_be_loaded(
    planner: str, shared_page: Page
) -> None:
    page = shared_page
    page.goto(f"{planner}plans")
    expect(page.locator("#summary")).to_contain_text("26 layers on 4 devices of 16GiB")
    expect(page.locator(".way.best")).to_have_count(1)
    expect(page.locator("#way")).to_contain_text("the best of all ways that fit")
    assert page.locator(".limit").text_content() == "memory of a device: 16GiB"
    page.fill("#num_devices", "2")
    page.select_option("#example", "gpt-1.3b")
    found = compared(page, lambda page: page.click("#load"))
    assert page.input_value("#num_devices") == ""
    assert "4 devices" in found["cluster"]


KNOBS: dict[str, tuple[Change, Callable[[Any, Any], bool]]] = {
    "batch size": (
        lambda page: page.fill("#batch_size", "32"),
        lambda before, after: after["ways"][0]["seconds"] > 2 * before["ways"][0]["seconds"],
    ),
    "devices": (
        lambda page: page.fill("#num_devices", "2"),
        lambda _, after: after["cluster"].startswith("2 devices of 24MiB"),
    ),
    "memory": (
        lambda page: page.fill("#memory", "13MiB"),
        lambda _, after: after["memory"] == 13 * 2**20,
    ),
    "link speed": (
        lambda page: page.fill("#link_speed", "0.01"),
        lambda before, after: after["ways"][0]["seconds"] > before["ways"][0]["seconds"],
    ),
    "micro-batch size": (
        lambda page: page.fill("#microbatch_size", "2"),
        lambda _, after: {way["samples"] for way in after["ways"]} == {2},
    ),
    "optimizer": (
        lambda page: page.select_option("#optimizer", "sgd"),
        lambda before, after: least_memory(after) < least_memory(before),
    ),
    "recomputation": (
        lambda page: page.uncheck("#recompute"),
        lambda before, after: has_recomputation(before) and not has_recomputation(after),
    ),
    "asynchronous schedules": (
        lambda page: page.check("#asynchronous"),
        lambda before, after: schedules(after) - schedules(before) >= {"pipedream"},
    ),
}


def least_memory(found: Any) -> float:
    return min(float(way["peak_memory"]) for way in found["ways"])


def has_recomputation(found: Any) -> bool:
    return any(set(way["recompute"]) - {"never"} for way in found["ways"])


def schedules(found: Any) -> set[str]:
    return {way["schedule"] for way in found["ways"]}


def test_each_knob_does_what_it_says_and_a_link_restores_all(small: Page) -> None:
    page = small
    before = compared(page, lambda page: page.fill("#batch_size", "9"))
    for name, (change, holds) in KNOBS.items():
        after = compared(page, change)
        assert holds(before, after), name
        before = after
    restored = compared(page, lambda page: page.reload())
    assert restored["ways"] == before["ways"]
    assert page.input_value("#memory") == "13MiB"
    assert page.is_checked("#asynchronous")


def test_knobs_can_be_set_back_to_what_is_described(small: Page) -> None:
    page = small
    compared(page, lambda page: page.fill("#num_devices", "2"))
    found = compared(page, lambda page: page.click("#reset"))
    assert found["cluster"].startswith("4 devices")
    assert "num_devices" not in page.url


def test_a_way_that_lost_is_described_with_its_cut(small: Page) -> None:
    page = small
    page.locator(".way.lost").first.dispatch_event("pointerenter")
    expect(page.locator("#way .verdict")).to_contain_text("It lost: does not fit: a rank needs ")
    page.locator(".way.lost").first.dispatch_event("pointerleave")
    expect(page.locator("#way .verdict")).to_have_text("★ the best of all ways that fit")
    way = page.locator(".way.estimated").first
    way.dispatch_event("click")
    label = way.get_attribute("aria-label") or ""
    name = (way.get_attribute("data-way") or "").partition(",")[0]
    assert label.startswith(name)
    expect(page.locator("#way .name")).to_contain_text(name)
    num_stages = page.locator(".stage").count()
    assert page.locator(".cut").count() == num_stages - 1
    assert page.locator(".layer").count() == 8
    page.reload()
    expect(page.locator("#way .name")).to_contain_text(name)
    expect(page.locator(".stage")).to_have_count(num_stages)


def test_the_bar_of_layers_names_each_layer_and_stage(small: Page) -> None:
    page = small
    page.locator(".layer").nth(3).dispatch_event("pointerenter")
    expect(page.locator("#layers .hint")).to_have_text("layer3: 3 ms, 12.5 %")
    page.select_option("#cost", "parameters")
    page.locator(".layer").nth(3).dispatch_event("pointerenter")
    expect(page.locator("#layers .hint")).to_have_text("layer3: 1MiB, 12.5 %")
    page.locator(".stage").first.dispatch_event("pointerenter")
    expect(page.locator("#layers .hint")).to_contain_text("stage 0 on rank 0, layer")
    assert "cost=parameters" in page.url


def test_the_keyboard_alone_reaches_ways_layers_and_the_table(small: Page) -> None:
    page = small
    page.focus("#asynchronous")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")  # past the button that resets the knobs
    first = page.evaluate("document.activeElement.dataset.way")
    assert first
    page.keyboard.press("End")
    last = page.evaluate("document.activeElement.dataset.way")
    assert last != first
    expect(page.locator("#way .name")).to_have_text(last)
    page.keyboard.press("Enter")
    page.keyboard.press("Home")
    page.keyboard.press("Tab")
    expect(page.locator("#way .name")).to_have_text(last)  # it was chosen
    page.focus(".layer[tabindex='0']")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#layers .hint")).to_contain_text("layer1: ")
    page.focus("#table-details summary")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#table th").first).to_have_attribute("aria-sort", "ascending")
    assert "sort=0" in page.url


def test_files_are_read_and_what_is_wrong_with_them_is_said_with_nothing_lost(
    small: Page, tmp_path: Path
) -> None:
    page = small
    (tmp_path / "profile.json").write_text(as_text(small_profile()).replace("layer3", "<b>x</b>"))
    compared(page, lambda page: page.set_input_files("#profile-file", tmp_path / "profile.json"))
    page.locator(".layer").nth(3).dispatch_event("pointerenter")
    expect(page.locator("#layers .hint")).to_contain_text("<b>x</b>: ")
    (tmp_path / "cluster.json").write_text('{"num_devices": 4}')
    compared_with_error(
        page, lambda: page.set_input_files("#cluster-file", tmp_path / "cluster.json")
    )
    expect(page.locator("#error")).to_contain_text("memory and devices: neither is given")
    assert page.input_value("#cluster") == '{"num_devices": 4}'
    assert "<b>x</b>" in page.input_value("#profile")
    compared(page, lambda page: page.fill("#cluster", as_text(small_cluster("20MiB"))))
    expect(page.locator("#error")).to_be_empty()
    page.reload()
    expect(page.locator("#summary")).to_contain_text("4 devices of 20MiB")


def compared_with_error(page: Page, change: Callable[[], object]) -> None:
    with page.expect_response("**/api/plans/compare"):
        change()
    expect(page.locator("#error")).not_to_be_empty()


def test_if_nothing_fits_the_page_says_what_would(small: Page) -> None:
    page = small
    compared(page, lambda page: page.fill("#memory", "2MiB"))
    expect(page.locator("#error")).to_contain_text("nothing fits in 2MiB; the closest is")
    expect(page.locator(".way.best")).to_have_count(0)
    expect(page.locator("#save")).to_be_disabled()


def test_the_best_plan_is_saved_as_a_file(small: Page) -> None:
    with small.expect_download() as download:
        small.click("#save")
    assert download.value.suggested_filename == "plan.json"
    assert json.loads(Path(download.value.path()).read_text())["batch_size"] == 8


def test_a_link_with_a_profile_of_another_tab_says_so(planner: str, shared_page: Page) -> None:
    shared_page.goto(f"{planner}plans?files=0123456789abcdef&num_devices=3")
    expect(shared_page.locator("#error")).to_contain_text("made with a profile of another tab")
    assert shared_page.input_value("#num_devices") == "3"


def test_a_long_search_shows_its_progress_and_can_be_cancelled(
    small: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def endless(_request: object, _schedules: object, progress: ReportProgress) -> None:
        try:
            while not ended.wait(0.01):
                progress(7, "best so far 3 ms")
        finally:
            ended.set()

    monkeypatch.setattr(routes, "compared", endless)
    small.fill("#batch_size", "0")
    expect(small.locator("#error")).to_contain_text("batch_size is 0")
    small.fill("#batch_size", "16")
    expect(small.locator("#progress")).to_have_text("planning: 7 tried, best so far 3 ms")
    expect(small.locator("#error")).to_be_empty()
    small.click("#cancel")
    expect(small.locator("#progress")).to_have_text("cancelled")
    expect(small.locator("#cancel")).to_be_hidden()
    assert ended.wait(10)


def test_nothing_is_wider_than_the_window(small: Page) -> None:
    for details in small.locator("#result details").all():
        details.evaluate("element => { element.open = true; }")
    for width in (480, 1280):
        small.set_viewport_size({"width": width, "height": 900})
        small.wait_for_function(FILLED)
        assert overflow(small) <= 0


def test_colours_follow_the_scheme_of_the_window(small: Page) -> None:
    small.emulate_media(color_scheme="dark")
    dark = small.evaluate("getComputedStyle(document.body).backgroundColor")
    small.emulate_media(color_scheme="light")
    assert dark != small.evaluate("getComputedStyle(document.body).backgroundColor")
