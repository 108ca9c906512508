"""The page of runs in a browser: curves over each other, details, links, and runs that are live."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from tests.runs.folders import START, line, timeline, write_run
from tests.studio.sharing import overflow
from torch import nn

import stageline as sl
from stageline.runs.records import PlannedCosts

MARKUP = "<img src=x onerror=alert(1)>"


def plan_of(num_ranks: int) -> PlannedCosts:
    times = dict.fromkeys(("forward", "input_grad", "weight_grad"), (1e-3,) * num_ranks)
    return PlannedCosts("1f1b, as planned", 0.03, times, (2.0**30,) * num_ranks)


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """Two runs: one that failed and was planned, and one whose name is markup."""
    events = (
        ("started", 0, ""),
        ("checkpoint saved", 50, "step-00000050"),
        ("warning", 60, f"the loss rises {MARKUP}"),
        ("failed", 100, "rank 1 failed in layer 'blocks.1'"),
    )
    step = timeline(4, 8, forward=[1.0, 1.0, 1.0, 2.0])
    lines = [line(n, loss=4.0 / n, peak_memory=[2**30] * 4) for n in range(1, 101)]
    modes = ("never", "never", "selective", "always")
    write_run(folder / "planned", step, lines, events, plan=plan_of(4), recompute=modes)
    write_run(folder / MARKUP, timeline(2, 4), [line(n, loss=9.0 / n) for n in range(1, 51)])
    return folder


@pytest.fixture
def shown(runs: Path, viewer: str, shared_page: Page) -> Page:
    """The page with the details of the planned run, and the curves of both."""
    assert runs.is_dir()
    page = shared_page
    page.goto("about:blank")
    page.goto(f"{viewer}runs?runs=planned&details=planned")
    expect(page.locator("#details-title")).to_have_text("planned")
    return page


def row(page: Page, name: str) -> Any:
    return page.locator("#list tbody tr").filter(has_text=name)


def ends_of(page: Page) -> tuple[float, float]:
    """Return the range of the address."""
    found: str = page.evaluate("new URLSearchParams(location.search).get('range')")
    low, high = map(float, found.split(","))
    return low, high


def test_runs_are_drawn_over_each_other_and_a_link_restores_them(shown: Page) -> None:
    page = shown
    row(page, MARKUP).locator("input").check()
    curves = page.locator("#loss .curve")
    expect(curves).to_have_count(2)
    assert [each.get_attribute("data-points") for each in curves.all()] == ["100", "50"]
    page.select_option("#along", "time")
    page.locator("#smoothing").fill("0.9")
    page.check("#logarithmic")
    expect(page.locator("#loss .axes")).to_contain_text("loss, logarithmic")
    expect(page.locator("#loss .faint")).to_have_count(2)
    page.locator("#zoom-step").fill("3")
    path = curves.last.get_attribute("d")
    page.reload()
    expect(page.locator("#loss .faint")).to_have_count(2)
    assert page.locator("#loss .curve").last.get_attribute("d") == path
    assert page.input_value("#along") == "time"
    assert page.input_value("#zoom-step") == "3"
    assert page.is_checked("#logarithmic")
    row(page, MARKUP).locator("input").uncheck()
    expect(page.locator("#loss .faint")).to_have_count(1)


def test_curves_are_zoomed_by_dragging_and_by_keys(shown: Page) -> None:
    page = shown
    box = page.locator("#loss svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 150, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.up()
    low, high = ends_of(page)
    assert 1 < low < high < 100
    expect(page.locator("#reading")).to_contain_text("planned: loss ")
    page.locator("#loss svg").focus()
    page.keyboard.press("+")
    closer = ends_of(page)
    assert low < closer[0] < closer[1] < high
    page.keyboard.press("ArrowRight")
    assert ends_of(page)[0] > closer[0]
    page.click("#whole")
    assert "range" not in page.url


def test_details_say_where_time_goes_what_happened_and_what_to_do(shown: Page) -> None:
    page = shown
    expect(page.locator("#facts")).to_contain_text("1f1b, as planned")
    expect(page.locator("#facts")).to_contain_text("recomputation2 × never, selective, always")
    expect(page.locator("#findings li").first).to_be_visible()
    assert "less time" in page.locator("#findings").inner_text()
    assert page.locator("#ranks .bar-row").count() == 4
    legend = page.locator("#ranks .legend").inner_text().split()
    assert legend[:3] == ["forward", "backward", "bubble"]
    assert "planned 1GiB" in page.locator("#memory").inner_text()
    caption = page.locator("#step-caption").inner_text()
    assert caption.startswith("step 100: predicted ")
    first = page.locator("#events tbody tr").first
    assert "failed" in first.inner_text()
    assert "blocks.1" in first.inner_text()
    assert MARKUP in page.locator("#events").inner_text()  # as text
    assert page.locator("main img").count() == 0


def test_an_action_under_the_pointer_is_named(shown: Page) -> None:
    canvas = shown.locator("#step canvas").last
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    shown.mouse.move(box["x"] + 4, box["y"] + 25)
    expect(shown.locator("#step-reading")).to_contain_text(
        "rank 0, predicted: forward of stage 0, micro-batch 0: 0 to 1 ms"
    )
    shown.mouse.move(box["x"] + 4, box["y"] + 39)
    expect(shown.locator("#step-reading")).to_contain_text("rank 0, measured: forward of stage 0")


def test_the_keyboard_alone_chooses_and_opens_runs(shown: Page) -> None:
    page = shown
    row(page, MARKUP).locator("input").focus()
    page.keyboard.press("Space")
    expect(page.locator("#loss .curve")).to_have_count(2)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#details-title")).to_have_text(MARKUP)
    expect(page.locator("#step-caption")).to_contain_text("no plan to compare with")


def test_a_run_that_is_removed_is_said_to_be_missing_and_comes_back(
    shown: Page, runs: Path
) -> None:
    write_run(runs / "short-lived")
    row(shown, "short-lived").locator("input").check()
    expect(shown.locator("#loss .curve")).to_have_count(2)
    shutil.rmtree(runs / "short-lived")
    expect(shown.locator("#error")).to_have_text("not in this folder: short-lived")
    expect(shown.locator("#details-title")).to_have_text("planned")
    write_run(runs / "short-lived")
    expect(shown.locator("#error")).to_be_empty()
    shutil.rmtree(runs / "short-lived")


def test_nothing_is_wider_than_the_window(shown: Page) -> None:
    for details in shown.locator("#details details").all():
        details.evaluate("element => { element.open = true; }")
    for width in (480, 1280):
        shown.set_viewport_size({"width": width, "height": 900})
        shown.wait_for_function(
            "() => document.querySelector('#loss svg').clientWidth == "
            "document.querySelector('#loss').clientWidth"
        )
        assert overflow(shown) <= 0


class Batches:
    """A loader whose batches a test hands out one by one."""

    def __init__(self) -> None:
        self.allowed: queue.Queue[bool] = queue.Queue()

    def __iter__(self) -> Iterator[Any]:
        while self.allowed.get(timeout=30):
            yield torch.ones(4, 4), torch.zeros(4, 1)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.allowed.put(True)


def train(folder: Path, batches: Batches, steps: int) -> threading.Thread:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "backend": "serial"}
    pipe = sl.Pipeline(model, nn.functional.mse_loss, **sizes)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    options: dict[str, Any] = {"steps": steps, "folder": folder, "report_every": 1}
    thread = threading.Thread(
        target=lambda: sl.fit(pipe, batches, optimizer, **options), daemon=True
    )
    thread.start()
    return thread


def test_a_run_is_followed_while_it_trains(shown: Page, runs: Path) -> None:
    page, batches = shown, Batches()
    thread = train(runs / "live", batches, steps=6)
    batches.allow(3)
    expect(row(page, "live")).to_contain_text("running")
    row(page, "live").locator("input").check()
    row(page, "live").get_by_role("button").click()
    curve = page.locator("#loss .curve").last
    expect(curve).to_have_attribute("data-points", "3")
    page.locator("#zoom-step").fill("4")
    page.locator("#loss svg").focus()
    page.keyboard.press("+")
    page.locator("#ranks details").evaluate("element => { element.open = true; }")
    address = page.url
    batches.allow(3)
    expect(row(page, "live")).to_contain_text("finished")
    expect(curve).to_have_attribute("data-points", "6")
    expect(row(page, "live")).to_contain_text("6 of 6")
    assert page.url == address  # zoom and choices stay
    assert page.input_value("#zoom-step") == "4"
    assert page.locator("#ranks details").get_attribute("open") is not None
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("loss.")
    thread.join(30)
    assert not thread.is_alive()


def test_a_page_that_is_not_visible_does_not_ask(runs: Path, viewer: str, page: Page) -> None:
    assert runs.is_dir()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.install()
    page.goto(f"{viewer}runs")
    expect(page.locator("#details-title")).not_to_be_empty()
    with page.expect_response("**/api/runs/list"):
        page.clock.run_for(1500)
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    asked.clear()
    page.clock.run_for(60_000)
    assert asked == []
    page.evaluate("delete document.hidden")
    with page.expect_request("**/api/runs/list"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_an_empty_folder_says_how_a_run_gets_there(
    studio: str, page: Page, runs_folder: Path
) -> None:
    page.goto(f"{studio}runs")
    expect(page.locator("#empty")).to_contain_text("There are no runs in this folder yet.")
    write_run(runs_folder / "first", lines=[line(1, time=START)])
    expect(page.locator("#details-title")).to_have_text("first")
    expect(page.locator("#empty")).to_be_hidden()


def test_ticks_are_round_and_told_apart(shown: Page, runs: Path) -> None:
    lines = [line(n, loss=97.19 + n / 10_000) for n in range(1, 101)]
    write_run(runs / "flat", timeline(2, 4, forward=1.37), lines)
    row(shown, "planned").locator("input").uncheck()
    row(shown, "flat").locator("input").check()
    expect(shown.locator("#loss .curve")).to_have_count(1)
    ticks = shown.locator("#loss .axes text[text-anchor=end]:not(.title)").all_text_contents()
    assert len(set(ticks)) == len(ticks) >= 4
    shown.evaluate(
        "() => { const write = CanvasRenderingContext2D.prototype.fillText; window.written = [];"
        "CanvasRenderingContext2D.prototype.fillText = function (...given) {"
        "window.written.push(given[0]); return write.apply(this, given); }; }"
    )
    row(shown, "flat").get_by_role("button").click()
    expect(shown.locator("#details-title")).to_have_text("flat")
    shown.wait_for_function("() => window.written.includes('0 ms')")
    times = [text for text in shown.evaluate("window.written") if text.endswith(" ms")]
    assert len(times) > 2
    assert all(float(text.removesuffix(" ms")).is_integer() for text in times)  # of 32.5 ms or so
    shutil.rmtree(runs / "flat")
